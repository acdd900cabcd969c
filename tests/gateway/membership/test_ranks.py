"""A gateway finds the data-parallel ranks behind its addresses, follows each, and asks for metrics once an address."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import plait.gateway.membership.balanced_address
from plait.backends.protocol.cache_state import CacheState
from plait.gateway.app import Gateway
from plait.gateway.config.file import ConfigError, parse_config
from plait.gateway.config.sections import EngineConfig
from plait.gateway.fleet.booking import Booking
from plait.gateway.fleet.health import HealthState
from plait.gateway.fleet.router import EngineBusyError
from plait.gateway.guests.discovery.found_config import FoundConfig
from plait.policy.types import Call
from tests.gateway.membership.fake_http import answer_requests
from tests.gateway.membership.watched_engine import report
from tests.waiting import WITHIN_S

TICK_S = 0.002
VLLM = """
vllm:prompt_tokens_total{{engine="{0}"}} 1.0
vllm:num_requests_running{{engine="{0}"}} {0}.0
vllm:num_requests_waiting{{engine="{0}"}} 0.0
vllm:cache_config_info{{block_size="16",engine="{0}",num_gpu_blocks="3000"}} 1.0
"""


class Server:
    """A server with ranks. `reports`: with Plait's adapter, whose ranks have a report each, and then no news."""

    def __init__(self, ranks: int, *, owner: str = "vllm", reports: bool = False) -> None:
        self.ranks = ranks
        self.owner = owner
        self.reports = reports
        self.reachable = True
        self.asked = Counter[str]()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        path, query = request.url.path, dict(request.url.params)
        self.asked[path] += 1
        if not self.reachable:
            raise httpx.ConnectError("refused", request=request)
        if path == "/v1/models":
            return self._json({"data": [{"id": "m", "owned_by": self.owner}]})
        if path == "/metrics" and self.owner == "vllm":
            return httpx.Response(200, content="".join(VLLM.format(rank) for rank in range(self.ranks)).encode())
        if path == "/v1/loads" and self.owner == "sglang":
            return self._json({"loads": [{"dp_rank": rank} for rank in range(self.ranks)]})
        if path == "/cache_state" and self.reports:
            return await self._report(query.get("rank", "0"), is_known="since" in query)
        return httpx.Response(404)

    async def _report(self, rank: str, *, is_known: bool) -> httpx.Response:
        while is_known:  # no news  # noqa: ASYNC110
            await asyncio.sleep(TICK_S)
        state = report(int(rank), epoch=f"epoch-{rank}")
        state = msgspec.structs.replace(state, rank=int(rank), ranks=self.ranks)
        return httpx.Response(200, content=msgspec.msgpack.encode(state))

    def _json(self, answer: Any) -> httpx.Response:
        return httpx.Response(200, content=msgspec.json.encode(answer))


@asynccontextmanager
async def serving(
    monkeypatch: pytest.MonkeyPatch, server: Server, others: Sequence[str] = (), **engine: Any
) -> AsyncIterator[Gateway]:
    answer_requests(monkeypatch, server.answer)
    engines = [{"name": "a", "url": "http://127.0.0.1:1", **engine}]
    engines += [{"name": name, "url": f"http://{name}.test"} for name in others]
    gateway = Gateway(parse_config({"engines": engines, "upstream": {"probe_interval_s": TICK_S}}, "test"))
    async with gateway.running(), asyncio.timeout(WITHIN_S):
        yield gateway


def up(gateway: Gateway) -> list[str]:
    engines = gateway.kernel.router.engines
    return [name for name, engine in engines.items() if engine.health.state is HealthState.UP]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - of the gateway's own tasks
        await asyncio.sleep(TICK_S)


NAMES = ["a@0", "a@1", "a@2"]


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
async def test_a_stock_server_tells_its_ranks_before_it_takes_calls(
    monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    server = Server(3, owner=owner)
    async with serving(monkeypatch, server) as gateway:
        await until(lambda: bool(up(gateway)))
        assert up(gateway) == NAMES
        await until(lambda: all(engine.cache.reports is False for engine in gateway.kernel.router.engines.values()))


async def test_each_rank_has_its_counts_from_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plait.gateway.membership.balanced_address, "CONNECTIONS", 0)
    server = Server(3)
    async with serving(monkeypatch, server) as gateway:
        await until(lambda: bool(up(gateway)))
        await until(lambda: all(engine.counts is not None for engine in gateway.kernel.router.engines.values()))
        asked = server.asked["/metrics"]
        counts = [engine.counts for engine in gateway.kernel.router.engines.values()]
        assert [(one.running, one.kv_tokens) for one in counts if one] == [(0, 16_000), (1, 16_000), (2, 16_000)]
        assert asked == 2, "once for the ranks, once for the counts"


async def test_ranks_that_are_switched_off_are_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, Server(3), ranks=1) as gateway:
        await until(lambda: gateway.kernel.router.engines["a"].counts is not None)
        counts = gateway.kernel.router.engines["a"].counts
        assert ([*gateway.kernel.router.engines], counts and (counts.running, counts.kv_tokens)) == (["a"], (3, 48_000))


async def test_each_rank_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(3, owner="plait", reports=True)
    async with serving(monkeypatch, server) as gateway:
        await until(lambda: up(gateway) == NAMES)
        engines = gateway.kernel.router.engines
        await until(lambda: all(engine.cache.last_report is not None for engine in engines.values()))
        assert [engine.process for engine in engines.values()] == ["epoch-0", "epoch-1", "epoch-2"]


async def test_ranks_are_counted_again_after_the_address_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(3)
    async with serving(monkeypatch, server) as gateway:
        await until(lambda: up(gateway) == NAMES)
        server.reachable = False
        await until(lambda: not up(gateway))
        server.reachable, server.ranks = True, 1
        await until(lambda: up(gateway) == ["a"])
        assert [*gateway.kernel.router.engines] == ["a"]


async def test_a_server_without_ranks_may_replace_one_with_some(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(3)
    async with serving(monkeypatch, server) as gateway:
        await until(lambda: up(gateway) == NAMES)
        server.owner = "llamacpp"
        await counted_again(gateway, server, 1)
        assert up(gateway) == ["a"]


async def test_a_report_with_another_number_than_the_configured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(3, reports=True)
    async with serving(monkeypatch, server, ranks=2) as gateway:
        await until(lambda: gateway.kernel.router.engines["a@0"].cache.problem is not None)
        assert "3 data-parallel ranks, and `ranks` says 2" in (gateway.kernel.router.engines["a@0"].cache.problem or "")
        assert [*gateway.kernel.router.engines] == ["a@0", "a@1"]


async def test_an_address_is_shown_drained_and_removed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, Server(3)) as gateway:
        await until(lambda: up(gateway) == NAMES)
        (shown,) = gateway.kernel.engines.describe_all()
        assert (shown["name"], shown["health"], [*shown["ranks"]]) == ("a", "up", NAMES)
        gateway.kernel.engines.drain("a", draining=True)
        assert all(engine.draining for engine in gateway.kernel.router.engines.values())
        gateway.kernel.engines.remove("a")
        assert not gateway.kernel.router.engines


def call_on(gateway: Gateway, engine: str) -> Booking:
    router = gateway.kernel.router
    call = Call("c", "m", 100, router.block_tokens, [])
    return router.book(call, router.select(call, 0.0, prefer=engine), 0.0)


async def counted_again(gateway: Gateway, server: Server, ranks: int) -> None:
    """The address is away, and comes back with other ranks."""
    server.reachable = False
    await until(lambda: not up(gateway))
    server.reachable, server.ranks = True, ranks
    await until(lambda: len(up(gateway)) == ranks)


async def test_a_former_rank_leaves_with_its_last_call_however_often_it_was_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(3)
    async with serving(monkeypatch, server) as gateway:
        await until(lambda: up(gateway) == NAMES)
        booking = call_on(gateway, "a@2")
        for ranks in (2, 3, 2):
            await counted_again(gateway, server, ranks)
        await asyncio.sleep(0.1)
        gateway.kernel.router.release(booking, 1.0, delivered=True)
        await until(lambda: [*gateway.kernel.router.engines] == NAMES[:2])
        await asyncio.sleep(0.1)
        assert gateway.kernel.registry.get_sample_value("plait_task_restarts_total", {"task": "rank"}) is None


async def test_an_address_waits_for_the_calls_of_former_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, Server(3), ranks=3) as gateway:
        await until(lambda: up(gateway) == NAMES)
        booking = call_on(gateway, "a@2")
        gateway.kernel.engines.change(EngineConfig(name="a", url="http://127.0.0.1:1", ranks=2))
        assert gateway.kernel.engines.describe("a")["outstanding_calls"] == 1
        gateway.kernel.engines.drain("a", draining=True)
        with pytest.raises(EngineBusyError):
            gateway.kernel.engines.remove("a")
        gateway.kernel.router.release(booking, 1.0, delivered=True)
        gateway.kernel.engines.remove("a")
        assert not gateway.kernel.router.engines


async def test_an_address_whose_ranks_change_while_it_hands_over_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(3)
    async with serving(monkeypatch, server, others="b") as gateway:
        await until(lambda: len(up(gateway)) == 6)
        gateway.kernel.engines.drain("a", draining=True)
        assert gateway.kernel.engines.describe("a")["hands_over"]
        gateway.kernel.engines.change(EngineConfig(name="a", url="http://127.0.0.1:1", ranks=1))
        shown = gateway.kernel.engines.describe("a")
        assert (shown["state"], shown["hands_over"]) == ("draining", False)
        await asyncio.sleep(0.05)
        assert gateway.kernel.registry.get_sample_value("plait_task_restarts_total", {"task": "hand over"}) is None


async def test_what_is_found_is_saved_once_each_address_has_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with serving(monkeypatch, Server(3)) as gateway:
        await until(lambda: up(gateway) == NAMES)
        await FoundConfig(gateway.config, gateway.kernel.router, lambda _model: "t").save(tmp_path / "found.toml")
        assert 'name = "a"' in (tmp_path / "found.toml").read_text()


async def test_a_former_rank_has_the_new_url_when_it_is_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, Server(3), ranks=3) as gateway:
        await until(lambda: up(gateway) == NAMES)
        booking = call_on(gateway, "a@2")
        gateway.kernel.engines.change(EngineConfig(name="a", url="http://127.0.0.1:1", ranks=2))
        gateway.kernel.engines.change(EngineConfig(name="a", url="http://127.0.0.2:2", ranks=3))
        assert all("127.0.0.2:2" in repr(link.client) for link in gateway.kernel.links.values())
        assert {engine.host for engine in gateway.kernel.router.engines.values()} == {"127.0.0.2"}
        gateway.kernel.router.release(booking, 1.0, delivered=True)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"url": "http://127.0.0.1:8000@3"}, "leave @ and the number out"),
        ({"name": "a@1"}, "is that of a rank"),
        ({"ranks": 0}, "from 1 to 1024"),
    ],
)
def test_a_rank_is_never_configured_by_itself(engine: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({"engines": [{"name": "a", "url": "http://127.0.0.1:1", **engine}]}, "test")


def test_a_report_of_a_rank_that_cannot_be_is_refused() -> None:
    state: CacheState = msgspec.structs.replace(report(), rank=2, ranks=2)
    with pytest.raises(ValueError, match="its ranks cannot be"):
        state.check()
