"""Whether several engines answer at one address: a load balancer's, which hides their caches and queues.

A look asks over new connections, as many balancers choose an engine by connection. No single engine gives the sign that
counts, whatever its ranks, API servers and restarts: a number that falls and recovers. The numbers are the epochs of
reports in the order of their first appearance, downwards, as no restarted engine has a former epoch; or the sums of its
counters, which are the same on all API servers (unlike times of start), and small for long after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from typing import Final

from msgspec.structs import replace

from plait.backends.errors import EngineError, EngineGarbledError
from plait.backends.protocol.dialects import DIALECTS
from plait.backends.protocol.engine_counts import read_owners, read_total
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.fleet.engine_cache import EngineCache
from plait.gateway.fleet.health import NOT_THERE
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_requests import FAILURES, EngineRequests, ReportFeed

CONNECTIONS: Final = 16
"""A look tells two engines apart in 99.8 % of cases if connections go to random ones, and ten always if in turn."""
CONFIRM_S: Final = 2.0
INTERVAL_S: Final = 60.0
UNTIL_KNOWN_S: Final = 0.1


async def watch_address(router: Router, engine: EngineConfig, upstream: UpstreamConfig) -> None:
    """Look once a minute, until cancelled; sooner again, with growing pauses, if the engine does not answer all of it.

    A second look confirms: another engine may take over during the first.
    """
    again_s = CONFIRM_S
    while True:
        first = router.addresses[engine.name][0]
        if first.health.state in NOT_THERE or first.cache.reports is None:
            await asyncio.sleep(UNTIL_KNOWN_S)
            continue
        several = None
        try:
            if await look(first.cache, engine, upstream):
                await asyncio.sleep(CONFIRM_S)
                several = await look(first.cache, engine, upstream)
            else:
                several = False
        except FAILURES as error:
            if isinstance(error, EngineError) and not isinstance(error, EngineGarbledError):
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, INTERVAL_S)
                continue
        again_s = CONFIRM_S
        router.comparisons.looked(engine.name, several=several)
        await asyncio.sleep(INTERVAL_S)


async def look(cache: EngineCache, engine: EngineConfig, upstream: UpstreamConfig) -> bool:
    """Whether there is a sign of several engines. Raises one of FAILURES."""
    numbers, epochs, at_once = list[float](), dict[str, int](), replace(upstream, probe_interval_s=0.0)
    row = None
    with ExitStack() as opened:  # to the end of the look, as a balancer may count connections
        requests = opened.enter_context(EngineRequests(engine, upstream))
        if cache.kind is None:
            owners = read_owners(await requests.get("/v1/models"))
            row = next((row for row in DIALECTS.values() if row.metrics and row.owners & owners), None)
        while len(numbers) < CONNECTIONS:
            if cache.kind is not None:
                report = await opened.enter_context(ReportFeed(engine, at_once, "")).next(cache.epoch, cache.cursor)
                numbers.append(epochs.setdefault(report.epoch, -len(epochs)))
            elif row is None or row.metrics is None:
                return False
            else:
                requests = opened.enter_context(EngineRequests(engine, upstream))
                numbers.append(read_total(row, await requests.get(row.metrics, accept=b"*/*")))
    return recovers(numbers)


def recovers(numbers: Sequence[float]) -> bool:
    """Whether a number falls below an earlier one, and a later one does not."""
    return any(second < first <= third for first, second, third in combinations(numbers, 3))
