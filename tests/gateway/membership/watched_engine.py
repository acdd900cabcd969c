"""An engine that a test scripts, and a monitor that watches it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

import plait.gateway.membership.monitor
from plait.backends.protocol.cache_state import CacheState, KvState, StoredRun
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.fleet.health import Health, HealthChange, HealthLimits, HealthState
from plait.gateway.fleet.router import Router
from plait.gateway.fleet.tokenizer_agreement import TokenizerAgreements
from plait.gateway.membership.hub_downloads import AwaitedTokenizer, HubDownloads
from plait.gateway.membership.monitor import Monitor
from plait.gateway.membership.tokenizer_search import TokenizerSearch
from plait.gateway.metrics import new_registry
from plait.gateway.supervision import Supervisor
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from tests.gateway.membership.fake_http import answer_requests
from tests.waiting import WITHIN_S

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
TICK_S = 0.001
UPSTREAM = UpstreamConfig(probe_interval_s=TICK_S)


class FakeEngine:
    """Answers `/v1/models` and `/cache_state`; `reports` are handed out one a poll, then polls wait."""

    def __init__(self) -> None:
        self.models: object = {"data": [{"id": "m", "max_model_len": 4_096, "object": "model"}]}
        self.reports: list[httpx.Response | httpx.HTTPError | CacheState] = []
        self.openapi: object = None
        self.reachable = True
        self.is_silent = False
        self.closes_at_once = False
        self.requests: list[httpx.Request] = []
        self.missed: list[httpx.Request] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/base/cache_state" and request.url.params["wait_ms"] == "0":
            return httpx.Response(401, request=request)  # to a look for a load balancer
        self.requests.append(request)
        self._fail_if_gone(request, httpx.ConnectError("refused", request=request))
        if self.closes_at_once:
            raise httpx.RemoteProtocolError("closed", request=request)
        if request.url.path in {"/base/v1/models", "/base/openapi.json"}:
            listed = self.models if request.url.path == "/base/v1/models" else self.openapi
            return httpx.Response(404 if listed is None else 200, content=msgspec.json.encode(listed), request=request)
        while not self.reports:
            await asyncio.sleep(TICK_S)
            self._fail_if_gone(request, httpx.ReadError("reset", request=request))
        report = self.reports.pop(0)
        if isinstance(report, CacheState):
            return httpx.Response(200, content=msgspec.msgpack.encode(report))
        if isinstance(report, httpx.HTTPError):
            raise report
        report.request = request
        return report

    def _fail_if_gone(self, request: httpx.Request, unreachable: httpx.TransportError) -> None:
        if not self.reachable:
            raise unreachable
        if self.is_silent:
            self.missed.append(request)
            raise httpx.ReadTimeout("nothing came", request=request)

    @property
    def polls(self) -> list[dict[str, str]]:
        """The queries of the cache-state requests so far."""
        return [dict(request.url.params) for request in self.requests if request.url.path == "/base/cache_state"]


def report(*hashes: int, cursor: int = 1, epoch: str = "1", granularity: int = 64) -> CacheState:
    return CacheState(
        kind="embedded", engine="e", epoch=epoch, cursor=cursor, model="m", block_tokens=16,
        granularity_tokens=granularity, snapshot=cursor == 1, stored=[StoredRun(None, list(hashes))], removed=[],
        kv=KvState(10, 5, 0),
    )  # fmt: skip


class NothingLacks:
    """Has all tokenizers."""

    def __init__(self) -> None:
        self.awaited: dict[str, AwaitedTokenizer] = {}

    def wait_for(self, _model: str, _awaited: AwaitedTokenizer) -> None:
        raise AssertionError

    def lacks(self, _model: str) -> bool:
        return False

    def exact(self, _model: str) -> None:
        return None

    def chat_template(self, _model: str) -> str | None:
        raise AssertionError

    def learn(self, *_found: object) -> None:
        raise AssertionError


@asynccontextmanager
async def watching(
    monkeypatch: pytest.MonkeyPatch,
    fake: FakeEngine,
    *,
    contexts: dict[str, int] | None = None,
    tokenizer: TokenizerFingerprint | None = None,
    **config: object,
) -> AsyncIterator[Router]:
    """A monitor of one engine, named a. The gateway has `tokenizer` for its models."""
    answer_requests(monkeypatch, fake.answer)
    monkeypatch.setattr(plait.gateway.membership.monitor, "AGE_INTERVAL_S", TICK_S)
    engine = msgspec.convert({"url": "http://engine/base", "name": "a", **config}, EngineConfig)
    router = Router(window_s=0.001)
    router.add_engine("a", COSTS, health=Health(HealthLimits(probe_s=TICK_S, max_probe_s=TICK_S)))
    before = asyncio.all_tasks()
    supervisor = Supervisor(new_registry())
    changes: list[HealthChange | None] = []
    monitor = Monitor(
        router,
        [engine],
        UPSTREAM,
        contexts or {},
        agreements=TokenizerAgreements(lambda _model: tokenizer),
        search=TokenizerSearch(
            NothingLacks(), Path("unused"), (), HubDownloads(NothingLacks(), supervisor), trusts_templates=False
        ),
        supervisor=supervisor,
        on_change=changes.append,
    )
    monitor.open()
    try:
        async with asyncio.timeout(WITHIN_S):
            yield router
    finally:
        await supervisor.close()
    assert asyncio.all_tasks() == before


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - of the monitor's own tasks
        await asyncio.sleep(TICK_S)


def is_up(router: Router) -> bool:
    return router.engines["a"].health.state is HealthState.UP
