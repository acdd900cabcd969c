"""What it costs that engines report their calls, in CPU time: `python -m benchmarks reported_calls`.

For the gateway: a poll without news, over its own client and as it was over httpx; another gateway's call from its
report to its end, beside one of its own from its booking to its end; and a report of 20 new calls. For an engine: what
the journal of calls takes in an iteration, with the polls of other gateways. The polled engine is an embedded one in a
process of its own. Figures are medians of rounds that take turns.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import msgspec
import uvloop

from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from e2e.servers import Launcher
from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.calls_journal import CallsJournal
from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import CacheState, KvState, OutstandingCall, StoredRun
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_requests import ReportFeed
from plait.lab.simulation.claim import Claim
from plait.policy.prefix.block_hash import chain
from plait.policy.types import Call

PROFILE: Final = "a6000-mistral-7b"
BLOCK_TOKENS: Final = 64
PROMPT_TOKENS: Final = 2_001
SHARED_BLOCKS: Final = 15
"""Of the 31 of a prompt."""
CALLS_A_REPORT: Final = 20
CALLS_A_ROUND: Final = 400
POLLS_A_ROUND: Final = 300
ITERATIONS_A_ROUND: Final = 2_000
GATEWAYS: Final = 4
"""So many others poll each engine."""
POLL_SHARE: Final = 0.2
CALL_SHARE: Final = 0.25
ITERATION_US: Final = 20.0
ITERATION_SHARE: Final = 0.01
"""The most that an engine may spend on an iteration's report: so many microseconds, or this part of the iteration."""
FAST: Final = "a100-mistral-7b"
"""The fastest of the profiles: its iterations are the shortest."""


@dataclass(slots=True)
class Costs:
    """Seconds of CPU time, of each round."""

    poll_s: list[float] = field(default_factory=list)
    httpx_poll_s: list[float] = field(default_factory=list)
    own_call_s: list[float] = field(default_factory=list)
    others_call_s: list[float] = field(default_factory=list)
    report_s: list[float] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The medians, in microseconds."""
        names = {
            "a poll without news": self.poll_s,
            "a poll without news, over httpx": self.httpx_poll_s,
            "an own call: book, send, first token, settle": self.own_call_s,
            "another gateway's call: come, computed, ended": self.others_call_s,
            f"a report of {CALLS_A_REPORT} new calls, read and applied": self.report_s,
            "in the engine, an iteration that a call comes in": self.iteration_s,
            "in the engine, an iteration of decodes": self.decode_s,
        }
        for name, times_s in names.items():
            yield f"{name:<56}{median(times_s) * 1e6:8.1f} us"

    def claims(self) -> Iterator[Claim]:
        """What has to hold."""
        poll = median(self.poll_s) / median(self.httpx_poll_s)
        yield Claim("a poll without news / over httpx", poll, most=POLL_SHARE)
        call = median(self.others_call_s) / median(self.own_call_s)
        yield Claim("another gateway's call / an own one", call, most=CALL_SHARE)
        report = median(self.report_s) / median(self.others_call_s)
        most = CALLS_A_REPORT
        yield Claim(f"a report of {most} calls / another gateway's call", report, most=most)
        costs = load_profile(FAST).cost_model()
        shortest_s = costs.prefill_time_s(PROMPT_TOKENS - SHARED_BLOCKS * BLOCK_TOKENS, SHARED_BLOCKS * BLOCK_TOKENS)
        most_us = max(ITERATION_US, ITERATION_SHARE * shortest_s * 1e6)
        for name, times_s, bound_us in (
            ("an iteration that a call comes in", self.iteration_s, most_us),
            ("an iteration of decodes", self.decode_s, ITERATION_US),
        ):
            value_us = median(times_s) * 1e6
            yield Claim(f"in the engine, {name} (us)", value_us, most=bound_us)


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim fails."""
    arguments = timed_parser(__doc__, rounds=9).parse_args()
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder)) as launch:
        engine = launch.engine("engine")
        engine.start()
        engine.wait_until_ready()
        costs = uvloop.run(_measure(engine.url, arguments.rounds))
    times_s = {name: median(getattr(costs, name)) for name in Costs.__slots__}
    report = Report(lines=list(costs.lines()), claims=list(costs.claims()), results=[times_s], is_timed=True)
    return finish("reported_calls", report, arguments)


async def _measure(url: str, rounds: int) -> Costs:
    costs, calls = Costs(), Calls()
    feed = ReportFeed(EngineConfig(name="engine", url=url), UpstreamConfig(probe_interval_s=1e-3), "gateway")
    async with AsyncExitStack() as stack:
        stack.enter_context(feed)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        for _ in range(rounds):
            costs.poll_s.append(await _polls(feed))
            costs.httpx_poll_s.append(await _httpx_polls(http))
            costs.own_call_s.append(calls.own_s())
            costs.others_call_s.append(calls.others_s())
            costs.report_s.append(calls.report_s())
            costs.iteration_s.append(iteration_s(comes=True))
            costs.decode_s.append(iteration_s(comes=False))
    return costs


async def _polls(feed: ReportFeed) -> float:
    """CPU seconds of a poll by the gateway's own client, the report applied."""
    router, state = new_router(), await feed.next(None, None)
    began_s = time.process_time()
    for _ in range(POLLS_A_ROUND):
        state = await feed.next(state.epoch, state.cursor)
        router.report("engine", state, 0.0, now_s=0.0)
    return (time.process_time() - began_s) / POLLS_A_ROUND


async def _httpx_polls(http: httpx.AsyncClient) -> float:
    """The same over httpx, as the gateway did."""
    router, headers = new_router(), {"accept": "application/msgpack"}
    first = await http.get("/cache_state", headers=headers)
    state = msgspec.msgpack.decode(first.content, type=CacheState)
    began_s = time.process_time()
    for _ in range(POLLS_A_ROUND):
        query: dict[str, str | int] = {"since": state.cursor, "epoch": state.epoch, "wait_ms": 1, "gateway": "gateway"}
        answer = await http.get("/cache_state", params=query, headers=headers)
        state = msgspec.msgpack.decode(answer.content, type=CacheState)
        router.report("engine", state, 0.0, now_s=0.0)
    return (time.process_time() - began_s) / POLLS_A_ROUND


def new_router() -> Router:
    """A router with one engine."""
    router = Router(gateway_id="own")
    router.add_engine("engine", load_profile(PROFILE).cost_model())
    router.health.answered("engine", {"m": None})
    return router


def report(stored: list[int], calls: list[OutstandingCall], ended: list[int], cursor: int = 1) -> CacheState:
    """What an engine says."""
    return CacheState(
        engine="engine",
        kind="embedded",
        epoch="1",
        cursor=cursor,
        model="m",
        block_tokens=16,
        granularity_tokens=BLOCK_TOKENS,
        snapshot=False,
        stored=[StoredRun(None, stored)] if stored else [],
        removed=[],
        kv=KvState(60_000, 10_000, 0),
        calls=calls,
        ended=ended,
    )


class Calls:
    """A gateway's own calls and those of another one, on prompts of which the first half is cached."""

    def __init__(self) -> None:
        self._router = new_router()
        self._numbers = count(1)
        self._shared = chain(range(SHARED_BLOCKS * BLOCK_TOKENS), BLOCK_TOKENS, 0)
        self._router.report("engine", report(list(self._shared), [], []), 0.0, now_s=0.0)

    def own_s(self) -> float:
        """CPU seconds of an own call from its booking to its end."""
        router, now_s, made = self._router, 0.0, [self._call(next(self._numbers)) for _ in range(CALLS_A_ROUND)]
        placed = [(call, router.select(call, now_s)) for call in made]
        usage = CallUsage(PROMPT_TOKENS, 100, SHARED_BLOCKS * BLOCK_TOKENS)
        began_s = time.process_time()
        for call, placement in placed:
            booking = router.book(call, placement, now_s)
            router.first_token(booking, now_s + 0.1)
            router.settle(booking, usage, now_s + 1.0)
        return (time.process_time() - began_s) / CALLS_A_ROUND

    def others_s(self) -> float:
        """CPU seconds of another's call, from the report that it has come to the one that it has ended.

        As many come, are computed and end together as in a report of a busy engine.
        """
        others = self._router.engines["engine"].cache.others
        numbers = [next(self._numbers) for _ in range(CALLS_A_ROUND)]
        come = [self._reported(number) for number in numbers]
        computed = [self._reported(number, is_computed=True) for number in numbers]
        began_s = time.process_time()
        for first in range(0, CALLS_A_ROUND, CALLS_A_REPORT):
            these = slice(first, first + CALLS_A_REPORT)
            others.apply(come[these], (), 0.0, snapshot=False, blocks=True)
            others.apply(computed[these], (), 0.1, snapshot=False, blocks=True)
            others.apply((), numbers[these], 1.0, snapshot=False, blocks=True)
        return (time.process_time() - began_s) / CALLS_A_ROUND

    def report_s(self) -> float:
        """CPU seconds of a report of new calls, read and applied."""
        router, spent_s, reports = self._router, 0.0, CALLS_A_ROUND // CALLS_A_REPORT
        for _ in range(reports):
            numbers = [next(self._numbers) for _ in range(CALLS_A_REPORT)]
            body = msgspec.msgpack.encode(report([], [self._reported(number) for number in numbers], []))
            began_s = time.process_time()
            router.report("engine", msgspec.msgpack.decode(body, type=CacheState), 0.0, now_s=0.0)
            spent_s += time.process_time() - began_s
            router.report("engine", report([], [], numbers), 0.0, now_s=0.0)
        return spent_s / reports

    def _hashes(self, number: int) -> list[int]:
        rest = [number] * (PROMPT_TOKENS - SHARED_BLOCKS * BLOCK_TOKENS)
        return [*self._shared, *chain(rest, BLOCK_TOKENS, self._shared[-1])]

    def _call(self, number: int) -> Call:
        return Call(f"call-{number}", "m", PROMPT_TOKENS, BLOCK_TOKENS, self._hashes(number))

    def _reported(self, number: int, *, is_computed: bool = False) -> OutstandingCall:
        missed_tokens = 0 if is_computed else PROMPT_TOKENS - SHARED_BLOCKS * BLOCK_TOKENS
        hashes = [] if is_computed else self._hashes(number)
        return OutstandingCall(number, "another", PROMPT_TOKENS, missed_tokens, False, is_computed, hashes)


def iteration_s(*, comes: bool) -> float:
    """CPU seconds that the journal of calls takes an engine in each iteration, with the polls of other gateways.

    If a call `comes` in each, one is computed, too, and one ends. Its blocks are named when it is first reported.
    """
    cache = CacheJournal()
    journal, tokens = CallsJournal(cache, BLOCK_TOKENS), range(PROMPT_TOKENS)
    cursors = dict.fromkeys(map(str, range(GATEWAYS)), 0)
    began_s = time.process_time()
    for number in range(ITERATIONS_A_ROUND):
        if comes:
            journal.arrived(number, "own", PROMPT_TOKENS, lambda: chain(tokens, BLOCK_TOKENS, 0), is_urgent=False)
            journal.computed(number - 1)
            journal.ended(number - 10)
        for gateway, cursor in cursors.items():
            if journal.has_news(cursor, gateway):
                msgspec.msgpack.encode(journal.since(cursor, gateway))
                cursors[gateway] = cache.cursor
    return (time.process_time() - began_s) / ITERATIONS_A_ROUND


if __name__ == "__main__":
    sys.exit(main())
