"""Plait's routes in the API server: who may ask, how long a report waits, in which form they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from plait.backends.protocol.cache_state import CacheState, KvState
from plait.backends.protocol.call_objectives import MAX_BODY_BYTES
from plait.backends.vllm.launch import SCHEDULER
from plait.backends.vllm.middleware import CacheStateMiddleware
from plait.backends.vllm.plugin import CHANGE_METHOD, METHOD

STATE = CacheState(
    engine="one",
    kind="vllm",
    epoch="e",
    cursor=7,
    model="tiny",
    block_tokens=16,
    granularity_tokens=64,
    snapshot=True,
    stored=[],
    removed=[],
    kv=KvState(10, 9, 1),
)


class Core:
    """vLLM's client of the engine core; `changes` lets those who wait go on."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.waits = asyncio.Event()
        self.changes = asyncio.Event()

    async def call_utility_async(self, method: str, *arguments: Any) -> bytes | int:
        if method == CHANGE_METHOD:
            (body,) = arguments
            self.asked.append((body,))
            return len(msgspec.json.decode(body))
        assert method == METHOD
        self.asked.append(arguments)
        if arguments[-1]:
            self.waits.set()
            await self.changes.wait()
        return msgspec.msgpack.encode(STATE)


def client_of(
    core: Core, *, keys: list[str] | None = None, scheduler: Any = SCHEDULER, errored: bool = False, ranks: int = 1
) -> Any:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
    )
    engine = SimpleNamespace(engine_core=core, vllm_config=config, errored=errored)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine, args=SimpleNamespace(api_key=keys)))

    async def others(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"vLLM's"})

    middleware = CacheStateMiddleware(others)

    async def with_app(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = app
        await middleware(scope, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(with_app), base_url="http://engine")


@pytest.mark.parametrize(
    ("accept", "media", "decode"),
    [
        ("application/json", "application/json", msgspec.json.decode),
        ("application/msgpack, */*", "application/msgpack", msgspec.msgpack.decode),
    ],
)
async def test_the_report_comes_as_asked_for(accept: str, media: str, decode: Callable[..., CacheState]) -> None:
    core = Core()
    async with client_of(core) as client:
        response = await client.get("/cache_state?since=3&epoch=e&gateway=g", headers={"accept": accept})
    assert (response.status_code, response.headers["content-type"]) == (200, media)
    assert msgspec.structs.replace(decode(response.content, type=CacheState), chats=None) == STATE
    assert core.asked == [(3, "e", "g", False)]


async def test_other_paths_are_vllms() -> None:
    async with client_of(Core()) as client:
        assert (await client.get("/v1/models")).status_code == 418
        assert (await client.get("/cache_state/more")).status_code == 418


async def test_it_waits_for_a_change_and_no_longer() -> None:
    core = Core()
    async with client_of(core) as client:
        waiting = asyncio.create_task(client.get("/cache_state?since=7&wait_ms=60000"))
        await core.waits.wait()
        assert not waiting.done()
        core.changes.set()
        assert (await waiting).status_code == 200
    assert core.asked == [(7, None, None, True)]


async def test_a_wait_in_vain_ends_with_the_state_as_it_is() -> None:
    core = Core()
    async with client_of(core) as client:
        assert (await client.get("/cache_state?since=7&wait_ms=2")).status_code == 200
        assert (await client.get("/cache_state?wait_ms=60000")).status_code == 200, "a snapshot does not wait"
    assert core.asked == [(7, None, None, True), (7, None, None, False), (None, None, None, False)]


@pytest.mark.parametrize(
    ("authorization", "status"),
    [("Bearer right", 200), ("bearer other", 200), ("Bearer wrong", 401), ("Basic right", 401), (None, 401)],
)
async def test_the_engines_key_guards_it(authorization: str | None, status: int) -> None:
    headers = {"authorization": authorization} if authorization else {}
    async with client_of(Core(), keys=["right", "other"]) as client:
        response = await client.get("/cache_state", headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"


async def test_the_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    async with client_of(Core()) as client:
        assert (await client.get("/cache_state")).status_code == 401
        assert (await client.get("/cache_state", headers={"authorization": "Bearer right"})).status_code == 200


@pytest.mark.parametrize("query", ["since=-1", "since=x", "since=1&wait_ms=1.5", "rank=1"])
async def test_a_bad_query_is_named(query: str) -> None:
    async with client_of(Core()) as client:
        response = await client.get(f"/cache_state?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] in {"since", "wait_ms", "rank"}


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"scheduler": None}, 501), ({"scheduler": "mine"}, 501), ({"errored": True}, 502), ({"ranks": 2}, 501)],
)
async def test_an_engine_that_cannot_report_says_so(fields: dict[str, Any], status: int) -> None:
    core = Core()
    async with client_of(core, **fields) as client:
        assert (await client.get("/cache_state")).status_code == status
    assert not core.asked


async def test_it_is_only_read() -> None:
    async with client_of(Core()) as client:
        assert (await client.post("/cache_state")).status_code == 400


# Changed objectives.


async def test_changed_objectives_reach_the_engine_core() -> None:
    core, body = Core(), b'[{"plait_handle":"h","plait_ttft_ms":1000},{"plait_handle":"\xc3\xa9"}]'
    async with client_of(core) as client:
        response = await client.post("/call_objectives", content=body)
    assert (response.status_code, response.json()) == (200, {"known": 2})
    assert core.asked == [(body.decode(),)]


@pytest.mark.parametrize(
    ("body", "status"), [(b"{}", 400), (b"[{}]", 400), (b"\xff", 400), (b"[" + b" " * MAX_BODY_BYTES, 413)]
)
async def test_a_body_that_is_none_does_not(body: bytes, status: int) -> None:
    core = Core()
    async with client_of(core) as client:
        response = await client.post("/call_objectives", content=body)
    assert (response.status_code, core.asked) == (status, [])
    assert response.json()["error"]["message"]


async def test_changes_need_the_engines_key_and_scheduler() -> None:
    core = Core()
    async with client_of(core, keys=["right"]) as client:
        assert (await client.post("/call_objectives", content=b"[]")).status_code == 401
        assert (await client.get("/call_objectives", headers={"authorization": "Bearer right"})).status_code == 405
    async with client_of(core, scheduler="mine") as client:
        assert (await client.post("/call_objectives", content=b"[]")).status_code == 501
    assert core.asked == []


async def test_an_engine_core_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Core):
        async def call_utility_async(self, *_: Any) -> bytes | int:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr("plait.backends.vllm.middleware.ANSWER_DEADLINE_S", 0.01)
    async with client_of(Stuck()) as client:
        assert (await client.post("/call_objectives", content=b"[]")).status_code == 504
