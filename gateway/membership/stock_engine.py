"""Reads the kind, the sizes and the counters of an engine without Plait's adapter, while it takes calls.

The kind is recognized once, by a few small requests. Its row in `dialects` then says where sizes and counters are. A
failure here is no failure of the engine: the values stay unknown, and calls go on.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Final

import structlog

from plait.backends.errors import EngineError, EngineGarbledError
from plait.backends.protocol.dialects import DIALECTS, METRICS_PATHS, Dialect, SizesRoute
from plait.backends.protocol.engine_counts import (
    EngineCounts,
    read_counts,
    read_owners,
    read_sizes,
    read_slots,
)
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.health import HealthState
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_requests import Body, EngineRequests, RefusedRequestError
from plait.gateway.timer import loop_time_s

INTERVAL_S: Final = 0.2
"""The period of reading metrics."""

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

_GONE: Final = frozenset((HealthState.UNTRIED, HealthState.DOWN))

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
        self._lists_slots = False  # the engine's counts come from its slots, not its metrics

    async def look(self) -> float:
        """Read what is due. Returns the seconds until the next look."""
        engine, asked_s = self._router.engines[self._name], loop_time_s()
        if engine.cache.reports is not False or engine.cache.kind is not None or engine.health.state in _GONE:
            self._forget()
        elif engine.health.takes_calls:
            try:
                return await self._read(engine, asked_s)
            except (EngineError, TimeoutError):
                pass  # probes decide whether the engine is out of service
        self._router.counted(self._name, None, asked_s)
        return NOT_ASKED_S

    def _forget(self) -> None:
        """Forget the kind, because another process may answer next."""
        if self._dialect is not None:
            self._dialect, self._lists_slots = None, False
            self._router.recognised(self._name, None)
        self._sizes_due_s = self._counts_due_s = 0.0

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
        if now_s >= self._counts_due_s:
            counts = await self._counts(dialect)
            pause_s = SLOTS_INTERVAL_S if self._lists_slots else INTERVAL_S
            self._counts_due_s = now_s + (WITHOUT_S if counts is None else pause_s)
            self._router.counted(self._name, counts, now_s)
        return min(NOT_ASKED_S, max(INTERVAL_S, self._counts_due_s - now_s))

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
                if row.metrics == path and read_counts(row, text) is not None:
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

    async def _counts(self, dialect: Dialect) -> EngineCounts | None:
        counts = None
        if dialect.metrics is not None and not self._lists_slots:
            text = await self._get(dialect.metrics)
            counts = None if text is None else read_counts(dialect, text)
        if counts is None and dialect.slots_path is not None:
            body = await self._get(dialect.slots_path)
            counts = None if body is None else read_slots(body)
            self._lists_slots = counts is not None
        return counts._replace(kv_tokens=None) if counts is not None and self._is_told else counts

    async def _get(self, path: str) -> Body | None:
        """The answer of a route; None if the engine refuses the request or the answer is too long."""
        with suppress(RefusedRequestError, EngineGarbledError):
            async with asyncio.timeout(self._timeout_s):
                return await self._requests.get(path, accept=b"*/*", max_bytes=MAX_BYTES)
        return None
