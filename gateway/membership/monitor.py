"""Keeps the router informed of its engines: which models they serve, what their caches have, whether they answer.

What answers at one address has four tasks:

- `_watch` probes it (`/v1/models`). While probes succeed, it long-polls the cache-state report, which also shows that
  the engine is alive. An engine without reports is probed periodically, and its cache is estimated. A server with
  several data-parallel ranks is watched by rank 0; `_follow_rank` long-polls the reports of each other rank.
- `_read_again` reads the models of a reporting engine each `MODELS_INTERVAL_S`, because it may have loaded an adapter;
  at once if the engine has refused a call for a model that it had listed.
- `follow_stock_engine` reads the kind and the counters of an engine without Plait's adapter.
- `watch_address` finds a load balancer over several engines.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import structlog

from plait.backends.errors import EngineError, EngineGarbledError, EngineTimeoutError
from plait.backends.protocol.cache_state import CacheState
from plait.backends.protocol.engine_counts import NO_SIZES
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.health import NOT_THERE, HealthChange, Offer
from plait.gateway.fleet.router import Router
from plait.gateway.fleet.tokenizer_agreement import TokenizerAgreements
from plait.gateway.membership.balanced_address import watch_address
from plait.gateway.membership.engine_openapi import OpenApi, read_openapi
from plait.gateway.membership.engine_requests import (
    FAILURES,
    EngineRequests,
    RefusedRequestError,
    ReportFeed,
    is_silence,
    probe_cause,
    report_problem,
)  # fmt: skip
from plait.gateway.membership.rank_count import ranks_of
from plait.gateway.membership.stock_engine import follow_stock_engine
from plait.gateway.membership.tokenizer_search import TokenizerSearch
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import loop_time_s

AGE_INTERVAL_S = 1.0
TELL_INTERVAL_S = 60.0

MIN_REPORT_INTERVAL_S = 0.02
"""The least time from one request for a report to the next, because a busy engine has changes at every iteration. After
a long poll that took longer, the next one follows at once.
"""

SOON_S = 0.1
"""The pause of a rank's reports until its address answers."""

MODELS_INTERVAL_S = 5.0
"""The period of `_read_again`."""

log = structlog.get_logger(__name__)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    root: str | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


def _context(
    name: str, listed: Mapping[str, _Model], said: Mapping[str, int | None], configured: Mapping[str, int]
) -> int | None:
    """The context of a model on an engine, in tokens: the smaller of what the engine has `said` and the configured one.

    Engines list no context for a LoRA adapter, which has that of its base model.
    """
    model = listed.get(name)
    names = [name] if model is None or model.parent is None else [name, model.parent]
    own, limits = map(said.get, names), map(configured.get, names)
    return min(filter(None, (next(filter(None, own), None), next(filter(None, limits), None))), default=None)


async def _listed_routes(requests: EngineRequests) -> OpenApi | None:
    """The engine's OpenAPI document; None if it has none. Raises `EngineError`."""
    try:
        return read_openapi(await requests.get("/openapi.json"))
    except (RefusedRequestError, EngineGarbledError, msgspec.DecodeError, UnicodeDecodeError):
        return None


class Monitor:
    """Probes and polls `engines`. `context_tokens` has the configured contexts, by model.

    `agreements` compares the engines' tokenizers with the gateway's; `search` finds missing tokenizers. `on_ranks` is
    called with an address and the number of its data-parallel ranks.
    """

    def __init__(
        self,
        router: Router,
        engines: Sequence[EngineConfig],
        upstream: UpstreamConfig,
        context_tokens: Mapping[str, int],
        *,
        agreements: TokenizerAgreements,
        search: TokenizerSearch,
        supervisor: Supervisor,
        on_change: Callable[[HealthChange | None], None],
    ) -> None:
        self._router = router
        self._upstream = upstream
        self._context_tokens = context_tokens
        self._engines = engines
        self._agreements = agreements
        self._search = search
        self._offers: dict[str, Offer] = {}
        self._wrong_offers = defaultdict[str, asyncio.Event](asyncio.Event)  # set until the models are read again
        router.health.on_wrong_offer = self._on_wrong_offer
        search.downloads.on_found = router.comparisons.anew
        self._routes: dict[str, OpenApi | None] = {}  # read once, until the engine is unreachable
        self._supervisor = supervisor
        self._on_change = on_change
        self._told: dict[str, tuple[str, float]] = {}  # the last logged reason of a failed probe, and its time
        self._hints: dict[str, str] = {}  # looked for once, until the engine answers
        self.unexplained = set[str]()
        """The addresses that are down, and whose hint is being looked for: their error is not whole yet."""
        self.on_ranks: Callable[[str, int], None] = lambda _address, _count: None

    def open(self) -> None:
        for engine in self._engines:
            self.add(engine)
        self._supervisor.start("monitor-age", self._age)

    def add(self, engine: EngineConfig) -> None:
        self._supervisor.start(f"monitor:{engine.name}", partial(self._watch, engine))
        self._supervisor.start(f"models:{engine.name}", partial(self._read_again, engine))
        follow = partial(follow_stock_engine, self._router, engine, self._upstream)
        self._supervisor.start(f"counts:{engine.name}", follow)
        self._supervisor.start(f"address:{engine.name}", partial(watch_address, self._router, engine, self._upstream))
        self._follow_ranks(engine)

    def _follow_ranks(self, engine: EngineConfig) -> None:
        """Long-poll the reports of the present ranks, each in a task of its own, except those of rank 0."""
        self._supervisor.cancel(f"ranks:{engine.name}")
        for rank, known in enumerate(self._router.addresses[engine.name][1:], 1):
            self._supervisor.start(f"ranks:{engine.name}", partial(self._follow_rank, engine, known, rank))

    def remove(self, engine_id: str) -> None:
        self._supervisor.cancel(f"monitor:{engine_id}")
        self._supervisor.cancel(f"models:{engine_id}")
        self._supervisor.cancel(f"counts:{engine_id}")
        self._supervisor.cancel(f"address:{engine_id}")
        self._supervisor.cancel(f"ranks:{engine_id}")
        self._told.pop(engine_id, None)
        self._hints.pop(engine_id, None)
        self._offers.pop(engine_id, None)
        self._wrong_offers.pop(engine_id, None)
        self._routes.pop(engine_id, None)
        self._agreements.forget(engine_id)
        self._search.lost(engine_id)
        self._router.comparisons.forget(engine_id)

    async def _watch(self, engine: EngineConfig) -> None:
        """Probe and poll one engine until cancelled. Reports silence and failures to the router's health."""
        feed = ReportFeed(engine, self._upstream, self._router.gateway_id)
        with feed, EngineRequests(engine, self._upstream) as requests:
            while True:
                waited_s = 0.0
                try:
                    await self._follow(engine, requests, feed)
                except FAILURES as error:
                    if is_silence(error):
                        waited_s = await self._ask_again(engine, requests)
                    else:
                        await self._unreachable(engine, error, requests)
                await asyncio.sleep(max(0.0, self._first(engine).health.probe_after_s - waited_s))

    async def _follow_rank(self, engine: EngineConfig, known: FleetEngine, rank: int) -> None:
        """Poll one rank while its address answers, until cancelled. `_watch` judges the address."""
        with (
            ReportFeed(engine, self._upstream, self._router.gateway_id, rank) as feed,
            EngineRequests(engine, self._upstream) as requests,
        ):
            while True:
                requested_s, pause_s = loop_time_s(), self._upstream.probe_interval_s
                with suppress(*FAILURES):
                    if known.health.state in NOT_THERE:
                        pause_s = SOON_S
                    elif self._first(engine).cache.reports is False and self._first(engine).cache.kind is None:
                        known.cache.no_reports()
                    elif await self._poll(engine, known, requests, feed):
                        pause_s = MIN_REPORT_INTERVAL_S
                await asyncio.sleep(max(0.0, requested_s + pause_s - loop_time_s()))

    def _first(self, engine: EngineConfig) -> FleetEngine:
        """The rank by which an address is probed."""
        return self._router.addresses[engine.name][0]

    def _on_wrong_offer(self, address: str) -> None:
        """An engine has refused a model that it had listed. No report brings it back before it is listed again."""
        self._offers[address] = self._router.addresses[address][0].offer
        self._wrong_offers[address].set()

    async def _read_again(self, engine: EngineConfig) -> None:
        """Read the models of a reporting engine, until cancelled. Ignores failures, which `_watch` handles.

        After a wrong offer, reads at once, but at most once in a probe interval.
        """
        wrong = self._wrong_offers[engine.name]
        with EngineRequests(engine, self._upstream) as requests:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(MODELS_INTERVAL_S):
                        await wrong.wait()
                is_wrong = wrong.is_set()
                wrong.clear()
                with suppress(*FAILURES):
                    if is_wrong or self._first(engine).cache.kind is not None:
                        await self._read_models(engine, requests)
                    if is_wrong:
                        self._answered(engine)
                if is_wrong:
                    await asyncio.sleep(self._upstream.probe_interval_s)

    async def _ask_again(self, engine: EngineConfig, requests: EngineRequests) -> float:
        """Probe once more after a missed probe. An engine that misses two is silent: a stopped process, a lost host.

        Returns the duration of the second probe: the pause between probes counts from their beginnings.
        """
        asked_s = loop_time_s()
        try:
            await self._probe(engine, requests)
        except FAILURES as error:
            if is_silence(error):
                detail = str(error.__cause__ or error)
                for change in self._router.health.silent(engine.name, asked_s, loop_time_s(), detail):
                    self._on_change(change)
                self._tell(engine, f"silent: {detail}")
            else:
                await self._unreachable(engine, error, requests)
        return loop_time_s() - asked_s

    async def _unreachable(self, engine: EngineConfig, error: Exception, requests: EngineRequests) -> None:
        """A probe was refused or failed. Looks once for a hint for the operator."""
        self._routes.pop(engine.name, None)
        self._search.lost(engine.name)
        self._router.comparisons.forget(engine.name)
        reason, detail = str(error) or type(error).__name__, str(error.__cause__ or "")
        hint = self._hints.get(engine.name, "")
        for change in self._router.health.unreachable(engine.name, probe_cause(error), reason, hint or detail):
            self._on_change(change)
        if engine.name not in self._hints:
            self.unexplained.add(engine.name)
            try:
                hint = self._hints[engine.name] = await requests.hint(error) or ""
            finally:
                self.unexplained.discard(engine.name)
            if hint:
                self._router.health.went_wrong(engine.name, reason, hint)
        self._tell(engine, self._first(engine).whole_error)

    def _tell(self, engine: EngineConfig, reason: str) -> None:
        """Log why a probe failed: at once if the reason is new, then once a minute."""
        now_s, (said, said_s) = loop_time_s(), self._told.get(engine.name, ("", 0.0))
        if reason != said or now_s - said_s > TELL_INTERVAL_S:
            self._told[engine.name] = reason, now_s
            log.info("probe failed", engine=engine.name, url=engine.url, error=reason)

    async def _follow(self, engine: EngineConfig, requests: EngineRequests, feed: ReportFeed) -> None:
        """Probe, then poll for as long as the engine answers."""
        while True:
            await self._probe(engine, requests)
            requested_s = loop_time_s()
            while await self._poll(engine, self._first(engine), requests, feed):
                self._answered(engine)
                await asyncio.sleep(max(0.0, requested_s + MIN_REPORT_INTERVAL_S - loop_time_s()))
                requested_s = loop_time_s()
            await asyncio.sleep(self._upstream.probe_interval_s)

    async def _probe(self, engine: EngineConfig, requests: EngineRequests) -> None:
        await self._read_models(engine, requests)
        self._answered(engine)

    async def _read_models(self, engine: EngineConfig, requests: EngineRequests) -> None:
        """Read the engine's models, routes and ranks, and make its offer. Raises one of FAILURES."""
        answer = await requests.get("/v1/models")
        listed = {model.id: model for model in msgspec.json.decode(answer, type=_ModelList).data}
        if engine.name not in self._routes:
            described = await _listed_routes(requests)
            if engine.ranks is None and (ranks := await ranks_of(requests, answer)) is not None:
                self._use_ranks(engine, ranks)
            self._routes[engine.name] = described
        stock = self._first(engine).stock
        sizes = NO_SIZES if stock is None else stock.sizes
        contexts = {name: sizes.context(name) for name in {*listed, *engine.models}}
        contexts |= {name: model.max_model_len for name, model in listed.items() if model.max_model_len is not None}
        models = {name: _context(name, listed, contexts, self._context_tokens) for name in engine.models or listed}
        adapters = {name: model.parent for name, model in listed.items() if model.parent and name in models}
        roots = {name: listed[name].root if name in listed else None for name in models if name not in adapters}
        if await self._search.prepare(engine.name, requests, roots):
            self._router.comparisons.anew()
        self._router.comparisons.contexts(engine.name, contexts, self._context_tokens)
        said = self._routes[engine.name]
        routes, fields = (None, {}) if said is None else (frozenset(said.paths), said.fields)
        self._offers[engine.name] = Offer(models, adapters, routes, fields)

    def _answered(self, engine: EngineConfig) -> None:
        offer, ranks = self._offers[engine.name], self._router.addresses[engine.name]
        for rank in ranks:
            engine_id = rank.view.engine_id
            change = self._router.health.answered(engine_id, offer.models, offer.adapters, offer.routes, offer.fields)
            if change is not None and rank is ranks[0]:
                self._told.pop(engine.name, None)
                log.info("probe answered", engine=engine.name, url=engine.url, models=sorted(offer.models))
            self._on_change(change)
        self._hints.pop(engine.name, None)

    def _use_ranks(self, engine: EngineConfig, count: int) -> None:
        if count != len(self._router.addresses[engine.name]):
            self.on_ranks(engine.name, count)
            self._follow_ranks(engine)

    async def _poll(self, engine: EngineConfig, known: FleetEngine, requests: EngineRequests, feed: ReportFeed) -> bool:
        """Fetch and apply one report of an engine, or of one of its ranks. False if there is no usable report."""
        engine_id, told, requested_s = known.view.engine_id, (known.cache.reports, known.cache.problem), loop_time_s()
        try:
            report = await feed.next(known.cache.epoch, known.cache.cursor)
            if report.ranks != len(self._router.addresses[engine.name]):
                self._use_other_ranks(engine, report)
                return True
            agreement = self._agreements.of(engine.name, self._offers[engine.name], report.tokenizer, report.chats)
            self._router.report(engine_id, report, requested_s, agreement, now_s=loop_time_s())
            self._router.health.identified(engine_id, report.epoch)
        except EngineTimeoutError:
            raise
        except (*FAILURES, ValueError) as error:
            if isinstance(error, EngineError):
                if known is not self._first(engine):
                    return False
                await self._probe(engine, requests)  # raises if the engine has ended
            if self._router.comparisons.is_due(engine.name):
                problem = await self._search.mismatch(known.offer, requests)
                self._router.comparisons.tokenizer(engine.name, problem)
            self._no_reports(known, report_problem(error), told)
            return False
        agreement.tell(engine_id, told[1])
        return True

    def _use_other_ranks(self, engine: EngineConfig, report: CacheState) -> None:
        """A report says another number of ranks than there are. Raises ValueError if that number is configured."""
        if engine.ranks is not None:
            raise ValueError(f"the engine has {report.ranks} data-parallel ranks, and `ranks` says {engine.ranks}")
        self._use_ranks(engine, report.ranks)

    def _no_reports(self, known: FleetEngine, problem: str | None, told: tuple[bool | None, str | None]) -> None:
        """The engine has no usable report. This is logged once for each reason, not at every probe."""
        engine_id = known.view.engine_id
        if told == (False, problem):
            pass
        elif problem is None:
            log.warning("engine has no cache-state report: its cache is estimated", engine=engine_id)
        else:
            log.warning("cache-state report refused", engine=engine_id, error=problem)
        self._router.no_reports(engine_id, problem)
        self._router.health.identified(engine_id, None)

    async def _age(self) -> None:
        while True:
            await asyncio.sleep(AGE_INTERVAL_S)
            self._router.age(loop_time_s())
