"""Looks at addresses: one server with ranks, API servers and restarts is never taken for several, and several are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

import plait.gateway.membership.balanced_address
from plait.backends.errors import EngineError, EngineGarbledError, EngineTimeoutError
from plait.backends.protocol.dialects import DIALECTS
from plait.backends.protocol.engine_counts import read_total
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.fleet.engine_cache import EngineCache
from plait.gateway.fleet.router import Router
from plait.gateway.membership.balanced_address import CONNECTIONS, look, watch_address
from tests.gateway.membership.fake_http import FakeHttp
from tests.gateway.membership.watched_engine import COSTS, report, until

ENGINE, UPSTREAM = EngineConfig(name="e", url="http://e"), UpstreamConfig()
REPORTS = "plait"
PREFIXES = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp"}
OWNERS = st.sampled_from([REPORTS, *PREFIXES])


@dataclass
class OneEngine:
    """An engine with API servers. Before each answer it serves some of `growths`; at `restarts` it begins anew."""

    owner: str
    total: float
    api_servers: int = 1
    growth: Callable[[], float] = lambda: 0.0
    restarts: frozenset[int] = frozenset()
    life: int = 0
    answers: int = 0
    name: str = "one"

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.answers += 1
        self.total += self.growth()
        if self.answers in self.restarts:
            self.life, self.total = self.life + 1, 0.0
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": self.owner}]})
        if path == "/cache_state" and self.owner == REPORTS:
            state = report(cursor=int(self.total), epoch=f"{self.name}, life {self.life}")
            return httpx.Response(200, content=msgspec.msgpack.encode(state))
        if path == "/metrics" and self.owner != REPORTS:
            began, name = self.life * 1e6 + self.answers % self.api_servers, PREFIXES[self.owner]
            text = (
                f"process_start_time_seconds {began}\n"
                f'{name}:prompt_tokens_total{{engine="0",dp_rank="0"}} {self.total / 2}\n'
                f'{name}:prompt_tokens_total{{engine="1",dp_rank="1"}} {self.total / 2}\n'
                f"{name}:num_requests_running {self.answers % 5}\n"
            )
            return httpx.Response(200, text=text)
        return httpx.Response(404)


def cache_of(owner: str) -> EngineCache:
    """The cache of an engine that reports, or of one without an adapter."""
    router = Router()
    router.add_engine("e", COSTS)
    cache = router.engines["e"].cache
    if owner == REPORTS:
        cache.kind, cache.epoch, cache.cursor, cache.reports = "embedded", "one, life 0", 7, True
    return cache


@dataclass
class Address:
    """Each connection goes to the engine that `choose` returns, and stays there."""

    choose: Callable[[], OneEngine]
    asked: list[str] = field(default_factory=list[str])

    def client(self, url: str, **_options: object) -> FakeHttp:
        engine = self.choose()

        async def answer(request: httpx.Request) -> httpx.Response:
            self.asked.append(request.url.path)
            return engine.answer(request)

        return FakeHttp(answer, url)


def looks(address: Address, times: int, owner: str) -> list[bool]:
    cache = cache_of(owner)

    async def looked() -> list[bool]:
        return [await look(cache, ENGINE, UPSTREAM) for _ in range(times)]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(plait.gateway.membership.engine_requests, "HttpClient", address.client)
        return asyncio.run(looked())


@given(
    owner=OWNERS,
    total=st.floats(1e4, 1e9),
    api_servers=st.integers(1, 8),
    restart=st.integers(0, 3 * CONNECTIONS),
    seed=st.integers(),
)
def test_one_engine_is_never_several(owner: str, total: float, api_servers: int, restart: int, seed: int) -> None:
    chance = random.Random(seed)
    steady = OneEngine(owner, total, api_servers, lambda: chance.uniform(0, 1e6))
    assert looks(Address(lambda: steady), 3, owner) == [False] * 3
    most = 1e4 / (4 * CONNECTIONS)  # a restarted engine does not come as far as before in three looks
    restarted = OneEngine(owner, total, api_servers, lambda: chance.uniform(0, most), frozenset({restart}))
    assert looks(Address(lambda: restarted), 3, owner) == [False] * 3
    successors = [OneEngine(owner, total * factor, api_servers, name=f"{factor}") for factor in (1, 0.1, 3)]
    asked = 0

    def taken_over() -> OneEngine:
        """The first engine is replaced while looks go on, and the second too."""
        nonlocal asked
        asked += 1
        return successors[(asked > restart) + (asked > restart + 3 * CONNECTIONS)]

    assert looks(Address(taken_over), 6, owner) == [False] * 6


@given(owner=OWNERS, totals=st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True), seed=st.integers())
def test_several_engines_are_seen_at_once_in_turn_and_soon_at_random(owner: str, totals: list[int], seed: int) -> None:
    chance = random.Random(seed)
    engines = [OneEngine(owner, 1e6 * total, growth=lambda: 100.0, name=str(total)) for total in totals]
    turns = cycle(engines)
    assert looks(Address(lambda: next(turns)), 2, owner) == [True, True]
    assert any(looks(Address(lambda: chance.choice(engines)), 4, owner))


def test_a_look_takes_new_connections_and_asks_for_short_reports() -> None:
    engine = OneEngine(REPORTS, 7.0)
    connections: list[dict[str, str]] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        connections.append(dict(request.url.params))
        return engine.answer(request)

    with pytest.MonkeyPatch.context() as monkeypatch:
        opened: list[FakeHttp] = []

        def client(url: str, **_options: object) -> FakeHttp:
            opened.append(FakeHttp(answer, url))
            return opened[-1]

        monkeypatch.setattr(plait.gateway.membership.engine_requests, "HttpClient", client)
        assert not asyncio.run(look(cache_of(REPORTS), ENGINE, UPSTREAM))
    assert len(opened) == 1 + CONNECTIONS
    asked = {"wait_ms": "0", "gateway": "", "since": "7", "epoch": "one, life 0"}
    assert connections == [asked] * CONNECTIONS, "short reports at once, beside the long poll of the gateway"


def test_an_engine_without_counters_is_not_asked_on() -> None:
    address = Address(lambda: OneEngine("library", 0.0))
    assert looks(address, 1, "library") == [False]
    assert address.asked == ["/v1/models"]


def test_only_counters_are_summed() -> None:
    text = b"vllm:prompt_tokens_total 5\nvllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running 3\nother_total 9\n"
    assert read_total(DIALECTS["vllm"], text) == 5.0


async def test_two_looks_in_a_row_decide_and_a_later_one_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = EngineTimeoutError("engine e said nothing for 4 s")
    found: list[bool | EngineTimeoutError] = [True, False, True, silent, True, True, False]

    async def next_look(*_asked: object) -> bool:
        one = found.pop(0) if found else False
        if isinstance(one, bool):
            return one
        assert not router.engines["e"].mismatches, "one look decides nothing"
        raise one

    for name in ("CONFIRM_S", "INTERVAL_S", "UNTIL_KNOWN_S"):
        monkeypatch.setattr(plait.gateway.membership.balanced_address, name, 0.001)
    monkeypatch.setattr(plait.gateway.membership.balanced_address, "look", next_look)
    router = Router()
    router.add_engine("e", COSTS)
    with capture_logs() as logs:
        task = asyncio.create_task(watch_address(router, ENGINE, UPSTREAM))
        await asyncio.sleep(0.01)
        assert not router.comparisons.looked_at, "it does not answer yet"
        router.health.answered("e", {"m": None})
        router.no_reports("e")
        await until(lambda: len(found) == 5)
        assert not router.engines["e"].mismatches
        await until(lambda: not found)
        await until(lambda: not router.engines["e"].mismatches)
        task.cancel()
    told = [(line["event"], line["about"]) for line in logs]
    assert told == [("engine differs", "address"), ("engine agrees again", "address")]


async def test_looks_that_are_not_answered_come_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    module = plait.gateway.membership.balanced_address
    lost, broken = EngineError("engine e closed the connection"), EngineGarbledError("engine e sent no HTTP")
    found: list[bool | EngineError] = [*[lost] * 6, False, lost, broken, lost]
    pauses = list[float]()

    async def next_look(*_asked: object) -> bool:
        one = found.pop(0)
        if isinstance(one, bool):
            return one
        raise one

    async def sleep(for_s: float) -> None:
        pauses.append(for_s)
        if not found:
            raise asyncio.CancelledError

    monkeypatch.setattr(module, "look", next_look)
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    router = Router()
    router.add_engine("e", COSTS)
    router.health.answered("e", {"m": None})
    router.no_reports("e")
    with pytest.raises(asyncio.CancelledError):
        await watch_address(router, ENGINE, UPSTREAM)
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 2, 60, 2]
