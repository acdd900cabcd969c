"""Several engine cores behind one API server: each is asked for itself, and gets the calls that name it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from plait.backends.adapter.required_names import UnsupportedEngineError
from plait.backends.protocol.cache_state import CacheState
from plait.backends.vllm import plugin
from plait.backends.vllm.launch import SCHEDULER
from plait.backends.vllm.middleware import CacheStateMiddleware
from plait.backends.vllm.plugin import METHOD
from tests.backends.vllm import fake_package
from tests.backends.vllm.fake_package import AsyncLLM, AsyncMPClient
from tests.backends.vllm.test_middleware import STATE


class Core:
    """vLLM's client of several engine cores, and what each was asked for."""

    def __init__(self, cores: int) -> None:
        self.core_engines = [bytes([place, 0]) for place in range(cores)]
        self.asked: list[tuple[Any, ...]] = []

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        return await self._call_utility_async(method, *arguments, engine=b"all")

    async def _call_utility_async(self, method: str, *arguments: Any, engine: bytes) -> Any:
        self.asked.append((engine, method, *arguments))
        if method != METHOD:
            return 1
        if arguments[-1]:
            await asyncio.Event().wait()
        return msgspec.msgpack.encode(msgspec.structs.replace(STATE, epoch=engine.hex()))


class Server:
    """An API server whose `cores` the middleware serves, and the rank of each request that it computed."""

    def __init__(self, cores: int, size: int | None = None) -> None:
        self.core = Core(cores)
        self.computed: list[int | None] = []
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(scheduler_cls=SCHEDULER),
            parallel_config=SimpleNamespace(data_parallel_size=cores if size is None else size),
        )
        self.engine = SimpleNamespace(engine_core=self.core, vllm_config=config, errored=False, add_request=self._add)
        self.add_request = self.engine.add_request
        middleware = CacheStateMiddleware(self._others)

        async def with_app(scope: Any, receive: Any, send: Any) -> None:
            scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=self.engine, args=None))
            await middleware(scope, receive, send)

        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(with_app), base_url="http://engine")

    async def _add(self, request_id: str, *, data_parallel_rank: int | None = None) -> None:
        assert request_id
        self.computed.append(data_parallel_rank)

    async def _others(self, scope: Any, _: Any, send: Any) -> None:
        """A route of vLLM's. One path stands for those on which vLLM reads the header itself."""
        rank = dict(scope["headers"]).get(b"x-data-parallel-rank")
        obeyed = int(rank) if rank is not None and scope["path"] == "/obeys" else None
        await asyncio.create_task(self.engine.add_request("r", data_parallel_rank=obeyed))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def post(self, path: str, rank: str | None = None, **options: Any) -> httpx.Response:
        return await self.client.post(path, headers=named(rank), **options)


def named(rank: str | None) -> Mapping[str, str]:
    return {} if rank is None else {"x-data-parallel-rank": rank}


@pytest.mark.parametrize("rank", range(3))
async def test_a_report_is_of_the_rank_that_the_query_names(rank: int) -> None:
    server = Server(3)
    headers = {"accept": "application/msgpack"}
    response = await server.client.get(f"/cache_state?rank={rank}&since=7&wait_ms=2&gateway=g", headers=headers)
    state = msgspec.msgpack.decode(response.content, type=CacheState)
    assert (state.rank, state.ranks, state.epoch, state.cursor) == (rank, 3, f"0{rank}00", STATE.cursor)
    engine = bytes([rank, 0])
    assert server.core.asked == [(engine, METHOD, 7, None, "g", wait) for wait in (True, False)]


async def test_rank_0_is_asked_by_default() -> None:
    server = Server(2)
    assert (await server.client.get("/cache_state")).json()["epoch"] == "0000"
    assert (await server.post("/call_objectives", content=b"[]")).status_code == 200
    assert {asked[0] for asked in server.core.asked} == {b"\0\0"}


@pytest.mark.parametrize("rank", range(2))
async def test_objectives_go_to_the_rank_in_the_header(rank: int) -> None:
    server = Server(2)
    assert (await server.post("/call_objectives", str(rank), content=b"[]")).json() == {"known": 1}
    assert server.core.asked[0][0] == bytes([rank, 0])


@pytest.mark.parametrize("path", ["/obeys", "/ignores"])
async def test_a_call_goes_to_the_rank_in_the_header_on_every_route(path: str) -> None:
    server = Server(2)
    for rank in ("1", "0", None):
        assert (await server.post(path, rank)).status_code == 200
    assert server.computed == [1, 0, None]


@pytest.mark.parametrize("path", ["/obeys", "/ignores", "/call_objectives"])
@pytest.mark.parametrize("rank", ["2", "x"])
async def test_a_rank_that_does_not_exist_is_refused(path: str, rank: str) -> None:
    server = Server(2)
    response = await server.client.post(path, content=b"[]", headers=named(rank))
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (server.computed, server.core.asked) == ([], [])


@pytest.mark.parametrize("size", [1, 4], ids=["one rank", "an API server for each rank"])
async def test_a_server_with_one_rank_is_as_without_ranks(size: int) -> None:
    server = Server(1, size)
    assert (await server.post("/ignores", "9")).status_code == 200
    assert server.engine.add_request == server.add_request
    state = (await server.client.get("/cache_state?rank=0")).json()
    assert (state["rank"], state["ranks"]) == (0, 1)
    assert (await server.client.get("/cache_state?rank=1")).status_code == 400
    assert (await server.post("/call_objectives", "9", content=b"[]")).status_code == 200
    assert [asked[0] for asked in server.core.asked] == [b"all", b"all"]


# The start of a scheduler.


def build(monkeypatch: pytest.MonkeyPatch, **parallel: Any) -> Any:
    fake_package.install(monkeypatch)
    monkeypatch.setattr(plugin, "install", lambda: None)
    return fake_package.build_rank({}, **parallel)


SEVERAL = [{"data_parallel_size": 2, "data_parallel_index": 0}, {"data_parallel_size": 1, "data_parallel_index": 1}]
"""A rank of a model with experts, and one of a dense model."""


@pytest.mark.parametrize("several", SEVERAL)
@pytest.mark.parametrize("external", [False, True])
def test_a_rank_starts(several: dict[str, int], external: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(monkeypatch, **several, data_parallel_external_lb=external)


@pytest.mark.parametrize("several", SEVERAL)
def test_ranks_that_could_not_be_reached_are_refused(several: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(AsyncMPClient, "_call_utility_async")
    monkeypatch.setattr(AsyncLLM, "add_request", AsyncMPClient.__init__)
    with pytest.raises(UnsupportedEngineError, match=r"--data-parallel-rank") as refusal:
        build(monkeypatch, **several, data_parallel_external_lb=False)
    assert "AsyncMPClient._call_utility_async" in str(refusal.value)
    assert "AsyncLLM.add_request(" in str(refusal.value)
    build(monkeypatch, **several, data_parallel_external_lb=True)
    build(monkeypatch, data_parallel_size=1, data_parallel_index=0)


def test_ranks_have_epochs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"data_parallel_size": 2, "data_parallel_index": index} for index in range(2)]
    epochs = {build(monkeypatch, **rank, data_parallel_external_lb=False).plait.epoch for rank in ranks}
    assert len(epochs) == 2
