"""Reads what an engine without Plait's adapter says of itself, while it takes calls: its metrics.

An engine that cannot be read serves all the same: then only the calls that the gateway sends are known.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from plait.backends.protocol.dialects import DIALECTS
from plait.backends.protocol.engine_counts import EngineCounts, read_counts
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_requests import FAILURES, EngineRequests
from plait.gateway.timer import loop_time_s

PATH: Final = "/metrics"
INTERVAL_S: Final = 0.2

WITHOUT_S: Final = 60.0
"""The pause after an answer without such counts."""

NOT_ASKED_S: Final = 1.0
"""The pause while an engine reports, or is out, and after a request that failed."""

MAX_BYTES: Final = 4 * 2**20
"""Of the metrics. vLLM's have some 100 kB."""


async def follow_counts(router: Router, config: EngineConfig, upstream: UpstreamConfig) -> None:
    """Read the counts of an engine while it takes calls and does not report, until cancelled."""
    with EngineRequests(config, upstream) as requests:
        while True:
            engine, counts, asked_s, pause_s = router.engines[config.name], None, loop_time_s(), NOT_ASKED_S
            cache = engine.cache
            is_asked = cache.reports is False and cache.kind is None and engine.health.takes_calls
            if is_asked:
                with suppress(*FAILURES, TimeoutError):
                    async with asyncio.timeout(upstream.probe_timeout_s):
                        counts = _counts(await requests.get(PATH, accept=b"text/plain", max_bytes=MAX_BYTES))
                        pause_s = WITHOUT_S if counts is None else INTERVAL_S
            if counts is not None and config.kv_tokens is not None:
                counts = counts._replace(kv_tokens=None)
            router.counted(config.name, counts, asked_s)
            await asyncio.sleep(pause_s)


def _counts(text: bytes | bytearray) -> EngineCounts | None:
    found = (read_counts(row, text) for row in DIALECTS.values())
    return next((counts for counts in found if counts is not None), None)
