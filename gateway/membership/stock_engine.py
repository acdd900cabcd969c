"""Reads the kind, the sizes and the counters of an engine without Plait's adapter, while it takes calls.

The kind is recognized once, by a few small requests. Its row in `dialects` then says where sizes and counters are. A
failure here is no failure of the engine: the values stay unknown, and calls go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

import structlog

from plait.backends.errors import EngineError, EngineGarbledError
from plait.backends.protocol.dialects import DIALECTS, METRICS_PATHS, Dialect, SizesRoute
from plait.backends.protocol.engine_counts import (
    EngineCounts,
    in_all,
    read_counts,
    read_owners,
    read_sizes,
    read_slots,
)
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.health import NOT_THERE
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_requests import Body, EngineRequests, RefusedRequestError
from plait.gateway.timer import loop_time_s

INTERVAL_S: Final = 0.2
"""The period of reading metrics while the engine has calls."""

IDLE_INTERVAL_S: Final = 5.0
"""The same while it has none: its API process makes some 50 kB each time."""

SLOTS_INTERVAL_S: Final = 1.0
"""The period of reading slots, which is longer because the answer lists the parameters of each call."""

SIZES_INTERVAL_S: Final = 5.0
"""The period of reading sizes. Ollama reports no sizes until a call has loaded the model."""

WITHOUT_S: Final = 60.0
"""The pause if the engine's kind is unknown, or it has no counters."""

NOT_ASKED_S: Final = 1.0
"""The pause while an engine makes reports or is out of service, and after a failed request."""

MAX_BYTES: Final = 4 * 2**20
"""The largest answer that is read. vLLM's metrics have some 100 kB."""

log = structlog.get_logger(__name__)


async def follow_stock_engine(router: Router, config: EngineConfig, upstream: UpstreamConfig) -> None:
    """Recognise and read an engine while it takes calls and does not report, until cancelled."""
    with EngineRequests(config, upstream) as requests:
        engine = StockEngine(router, config, requests, upstream.probe_timeout_s)
        while True:
            pause_s = await engine.look()
            await asyncio.sleep(pause_s)


class StockEngine:
    """One engine, which may turn out to have an adapter. Each of `requests` may take `timeout_s`."""

    def __init__(self, router: Router, config: EngineConfig, requests: EngineRequests, timeout_s: float) -> None:
        self._router = router
        self._name = config.name
        self._is_told = config.kv_tokens is not None  # the operator's word on the KV cache comes before the engine's
        self._requests = requests
        self._timeout_s = timeout_s
        self._dialect: Dialect | None = None
        self._sizes_due_s = self._counts_due_s = 0.0
        self._rests_until_s = 0.0  # unless this gateway sends it a call
        self._lists_slots = False  # the engine's counts come from its slots, not its metrics

    async def look(self) -> float:
        """Read what is due. Returns the seconds until the next look."""
        ranks, asked_s = self._router.addresses[self._name], loop_time_s()
        cache, state = ranks[0].cache, ranks[0].health.state
        if cache.reports is not False or cache.kind is not None or state in NOT_THERE:
            self._forget()
        elif any(rank.health.takes_calls for rank in ranks):
            try:
                return await self._read(ranks[0], asked_s)
            except (EngineError, TimeoutError):
                pass  # probes decide whether the engine is out of service
        self._counted({}, asked_s)
        return NOT_ASKED_S

    def _counted(self, counts: Mapping[int, EngineCounts], asked_s: float) -> None:
        """The counts of each rank; those of all together if the address is one engine. Empty: none are given."""
        ranks = self._router.addresses[self._name]
        if len(ranks) == 1 and counts:
            counts = {0: in_all(counts.values())}
        elif len(ranks) == len(counts):  # where ranks span machines, their numbers on this one do not begin at 0
            counts = dict(enumerate(counts.values()))
        for place, rank in enumerate(ranks):
            count = counts.get(place)
            known = count if count is None or not self._is_told else count._replace(kv_tokens=None)
            self._router.counted(rank.view.engine_id, known, asked_s)

    def _forget(self) -> None:
        """Forget the kind, because another process may answer next."""
        if self._dialect is not None:
            self._dialect, self._lists_slots = None, False
            self._router.recognised(self._name, None)
        self._sizes_due_s = self._counts_due_s = self._rests_until_s = 0.0

    async def _read(self, engine: FleetEngine, now_s: float) -> float:
        """Raises `EngineError` or TimeoutError if the engine does not answer."""
        dialect = self._dialect
        if dialect is None and now_s >= self._counts_due_s:
            dialect = self._dialect = await self._recognise(engine)
            self._counts_due_s = now_s + WITHOUT_S if dialect is None else 0.0
            if dialect is not None:
                self._router.recognised(self._name, dialect.kind)
                log.info("engine recognised", engine=self._name, kind=dialect.title)
        if dialect is None:
            return NOT_ASKED_S
        if dialect.sizes is not None and now_s >= self._sizes_due_s:
            await self._read_sizes(dialect.kind, dialect.sizes)
            self._sizes_due_s = now_s + SIZES_INTERVAL_S
        has_calls = any(rank.view.outstanding for rank in self._router.addresses[self._name])
        due_s = self._counts_due_s if has_calls else max(self._counts_due_s, self._rests_until_s)
        if now_s >= due_s:
            counts = await self._counts(dialect)
            pause_s = SLOTS_INTERVAL_S if self._lists_slots else INTERVAL_S
            due_s = self._counts_due_s = now_s + (pause_s if counts else WITHOUT_S)
            is_idle = not any(count.running or count.waiting for count in counts.values())
            self._rests_until_s = now_s + IDLE_INTERVAL_S if is_idle else now_s
            self._counted(counts, now_s)
        return min(NOT_ASKED_S, max(INTERVAL_S, due_s - now_s))

    async def _recognise(self, engine: FleetEngine) -> Dialect | None:
        """The kind, by the owner of the listed models, the routes, the sizes or the metrics; None if unknown.

        A kind stays possible if one of its routes does not answer.
        """
        listed = await self._get("/v1/models")
        owners, routes = set() if listed is None else read_owners(listed), engine.offer.routes or ()
        for row in DIALECTS.values():
            if not (row.owners.isdisjoint(owners) and row.routes.isdisjoint(routes)):
                return row
        for row in DIALECTS.values():
            body = None if row.sizes is None else await self._try(row.sizes.path)
            if body is not None and row.sizes is not None and read_sizes(row.sizes, body) is not None:
                return row
        for path in METRICS_PATHS:
            text = await self._try(path) or b""
            for row in DIALECTS.values():
                if row.metrics == path and read_counts(row, text):
                    return row
        return None

    async def _try(self, path: str) -> Body | None:
        try:
            return await self._get(path)
        except (EngineError, TimeoutError):
            return None

    async def _read_sizes(self, kind: str, route: SizesRoute) -> None:
        body = await self._get(route.path)
        sizes = None if body is None else read_sizes(route, body)
        if sizes is not None:
            self._router.recognised(self._name, kind, replace(sizes, kv_tokens=None) if self._is_told else sizes)

    async def _counts(self, dialect: Dialect) -> dict[int, EngineCounts]:
        counts: dict[int, EngineCounts] = {}
        if dialect.metrics is not None and not self._lists_slots:
            text = await self._get(dialect.metrics)
            counts = {} if text is None else read_counts(dialect, text)
        if not counts and dialect.slots_path is not None:
            body = await self._get(dialect.slots_path)
            slots = None if body is None else read_slots(body)
            counts = {} if slots is None else {0: slots}
            self._lists_slots = bool(counts)
        return counts

    async def _get(self, path: str) -> Body | None:
        """The answer of a route; None if the engine refuses the request or the answer is too long."""
        with suppress(RefusedRequestError, EngineGarbledError):
            async with asyncio.timeout(self._timeout_s):
                return await self._requests.get(path, accept=b"*/*", max_bytes=MAX_BYTES)
        return None
