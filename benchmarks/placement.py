"""What it costs to place a call: CPU time of select, book and settle in the router: `python -m benchmarks placement`.

Then what a call costs that passes admission as it ships: with nobody waiting, and with 10,000 calls that wait.

Prompts are hashed beforehand. Two trees have the statistics of Preble's table 1: tool lists (many branches, short
prompts) and questions about videos (few branches, long prompts). Engines report their caches, or do not. Some calls are
always outstanding. One core; the minimum of several rounds counts, since other work on the machine only adds to it.

With `--held` it is `python -m benchmarks held` instead: how placement does against others.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import tracemalloc
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, pstdev
from typing import Final

from benchmarks import held
from benchmarks.placing import receipts
from benchmarks.placing.full_line import FullLine
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish, table
from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import CacheState, KvState, StoredRun
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.router import Router
from plait.lab.simulation.claim import Claim
from plait.policy.types import Call, Placement

MODEL: Final = "m"
BLOCK_TOKENS: Final = 64
RATE_PER_ENGINE_S: Final = 20.0
OUTSTANDING_PER_ENGINE: Final = 16
WAITING_SHARE: Final = 1 / 8
"""Of the outstanding calls that have no first token yet."""
ZIPF: Final = 1.1
PROFILE: Final = "a6000-mistral-7b"
CALLS: Final = 6000
WARM_UP_PER_ENGINE: Final = 20
"""Calls before the measured ones: enough that calls end."""
REPORT_EVERY: Final = 100
"""Calls between two reports of an engine."""
LINE_ENGINES: Final = 8
WAITING: Final = 10_000
HELD: Final = "--held"
MOST_TIMES: Final = 2.0
"""What a call may cost with `WAITING` calls in the lines, over what it costs with none."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Prompts of a workload: means and standard deviations of Preble's table 1.

    `branches` are the children of the root, each with `leaves` prefixes below it; a prompt has `own_share` of its own.
    """

    name: str
    prompt_tokens: tuple[int, int]
    output_tokens: int
    shared_share: float
    branches: int
    leaves: int


TOOLBENCH: Final = Shape("ToolBench-like", (1835, 742), 43, 0.85, 40, 40)
VIDEO_QA: Final = Shape("VideoQA-like", (9865, 5976), 4, 0.88, 600, 1)
PREBLE_CALLS_S: Final = {TOOLBENCH.name: 245, VIDEO_QA.name: 2931}
"""Of Preble's global scheduler, as published (section 4.4)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case. Calls a second of one core, and microseconds of CPU a call: 99th percentile and the parts' means."""

    shape: str
    engines: int
    reports: bool
    calls_s: float
    p99_us: float
    select_us: float
    book_us: float
    settle_us: float
    tree_blocks: int
    bytes_a_block: float
    prompt_tokens: tuple[float, float]
    shared_share: float


@dataclass(frozen=True, slots=True)
class LineRow:
    """Microseconds of CPU that a call takes on its way through admission, the router included."""

    shape: str
    waiting: int
    call_us: float


def main() -> int:
    """Measure, print, write; returns 1 if a claim fails."""
    if HELD in sys.argv:
        sys.argv.remove(HELD)
        return held.main()
    parser = timed_parser(__doc__, rounds=3)
    parser.add_argument("--policy", default="plait", help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=CALLS, help="measured in a round (default: %(default)s)")
    parser.add_argument("--receipts", action="store_true", help="what it costs to keep what was compared, and no more")
    arguments = parser.parse_args()
    if arguments.receipts:
        return _with_receipts(arguments)
    rows = []
    for shape in (TOOLBENCH, VIDEO_QA):
        for engines in (8, 256):
            for reports in (True, False):
                rows.append(
                    measure(shape, engines, arguments.policy, arguments.calls, arguments.rounds, reports=reports)
                )
                print(f"{rows[-1]}", file=sys.stderr)
    lines = measure_lines(arguments.calls, arguments.rounds)
    report = Report(
        lines=list(markdown(rows, lines)),
        claims=[*claims(rows), *line_claims(lines)],
        results=[*map(asdict, rows), *map(asdict, lines)],
        is_timed=True,
    )
    return finish("placement", report, arguments)


def _with_receipts(arguments: argparse.Namespace) -> int:
    """Measure, print, write; returns 1 if a claim fails."""
    rows: list[receipts.ReceiptRow] = []
    for shape in (TOOLBENCH, VIDEO_QA):
        new = partial(Fleet, shape, policy=arguments.policy, reports=True)
        rows += receipts.measure(shape.name, new, WARM_UP_PER_ENGINE, arguments.calls, arguments.rounds)
    found = list(receipts.claims(rows))
    report = Report(lines=list(receipts.markdown(rows)), claims=found, results=list(map(asdict, rows)), is_timed=True)
    return finish("placement, with receipts", report, arguments)


def measure(shape: Shape, engines: int, policy: str, calls: int, rounds: int, *, reports: bool) -> Row:
    """The fastest of some rounds on fresh fleets."""
    best: tuple[list[tuple[int, int, int]], Fleet] | None = None
    for number in range(rounds):
        fleet = Fleet(shape, engines, policy, number, reports=reports)
        fleet.run(WARM_UP_PER_ENGINE * engines)
        with _no_collections():
            times = fleet.run(calls)
        if best is None or sum(map(sum, times)) < sum(map(sum, best[0])):
            best = times, fleet
    assert best is not None
    times, fleet = best
    totals = sorted(sum(parts) / 1e3 for parts in times)
    lengths = fleet.lengths
    select_us, book_us, settle_us = (fmean(part) / 1e3 for part in zip(*times, strict=True))
    return Row(
        shape.name,
        engines,
        reports,
        1e6 * len(totals) / sum(totals),
        totals[int(0.99 * len(totals))],
        select_us,
        book_us,
        settle_us,
        len(fleet.router.tree),
        _bytes_a_block(shape, engines, policy, reports=reports),
        (fmean(lengths), pstdev(lengths)),
        fmean(fleet.shared),
    )


def measure_lines(calls: int, rounds: int) -> list[LineRow]:
    """With nobody waiting and with many, in turns; the fastest round of each."""
    best: dict[tuple[str, int], float] = {}
    for number in range(rounds):
        for shape in (TOOLBENCH, VIDEO_QA):
            for waiting in (0, WAITING):
                prompts = (call for call, _ in _prompts(shape, number))
                line = FullLine(PROFILE, prompts, LINE_ENGINES, waiting, shape.output_tokens)
                with _no_collections():
                    took_us = line.run(calls)
                best[shape.name, waiting] = min(took_us, best.get((shape.name, waiting), took_us))
    return [LineRow(*case, took_us) for case, took_us in best.items()]


@contextmanager
def _no_collections() -> Iterator[None]:
    """As in the gateway, whose collections are few."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class Fleet:
    """A router with its engines, and the calls that come. `lengths` and `shared` describe the prompts.

    `keep` takes each placement, in the time of `select`.
    """

    def __init__(self, shape: Shape, engines: int, policy: str, seed: int, *, reports: bool) -> None:
        self.lengths: list[int] = []
        self.shared: list[float] = []
        self.keep: Callable[[Placement], object] = _nothing
        profile = load_profile(PROFILE)
        self.router = Router(policy)
        for number in range(engines):
            self.router.add_engine(f"e{number}", profile.cost_model(), kv_tokens=profile.kv.tokens)
            self.router.health.answered(f"e{number}", {MODEL: None})
        self._shape = shape
        self._reports = reports
        self._prompts = _prompts(shape, seed)
        self._kept = OUTSTANDING_PER_ENGINE * engines
        self._rate_per_s = RATE_PER_ENGINE_S * engines
        self._waiting: deque[Booking] = deque()
        self._running: deque[Booking] = deque()
        self._stored: dict[str, list[Call]] = {f"e{number}": [] for number in range(engines)}
        self._cursor = 0
        self._now_s = 0.0
        self._number = 0

    def run(self, calls: int) -> list[tuple[int, int, int]]:
        """Place so many calls; the oldest ones end. Nanoseconds of CPU time of select, book and settle of each."""
        times = []
        router, clock = self.router, time.thread_time_ns
        for _ in range(calls):
            call, shared = next(self._prompts)
            self._number += 1
            self._now_s += 1 / self._rate_per_s
            now_s = self._now_s
            began = clock()
            placement = router.select(call, now_s)
            self.keep(placement)
            selected = clock()
            booking = router.book(call, placement, now_s)
            booked = clock()
            self._waiting.append(booking)
            times.append((selected - began, booked - selected, self._go_on(now_s)))
            self.lengths.append(call.prompt_tokens)
            self.shared.append(shared)
            if self._reports and self._number % max(1, REPORT_EVERY // len(router.engines)) == 0:
                self._report(f"e{self._number // max(1, REPORT_EVERY // len(router.engines)) % len(router.engines)}")
            if self._number % 1000 == 0:
                router.age(now_s)
        return times

    def end_all(self) -> None:
        """All calls end. Then the window passes."""
        for booking in self._waiting:
            self.router.first_token(booking, self._now_s)
        for booking in [*self._waiting, *self._running]:
            self.router.settle(booking, CallUsage(booking.call.prompt_tokens, 1, None), self._now_s)
            self._stored[booking.placement.engine_id].append(booking.call)
        self._waiting.clear()
        self._running.clear()
        for name, calls in self._stored.items():
            if self._reports:
                self._report(name)
            calls.clear()
        self.router.age(self._now_s + 1e6)

    def _go_on(self, now_s: float) -> int:
        """The oldest waiting call gets its first token, and the oldest running one ends. Nanoseconds of CPU time."""
        clock, began = time.thread_time_ns, time.thread_time_ns()
        if len(self._waiting) > self._kept * WAITING_SHARE:
            self._running.append(self._waiting.popleft())
            self.router.first_token(self._running[-1], now_s)
        if len(self._running) > self._kept * (1 - WAITING_SHARE):
            ended = self._running.popleft()
            usage = CallUsage(ended.call.prompt_tokens, self._shape.output_tokens, None)
            self.router.settle(ended, usage, now_s)
            self._stored[ended.placement.engine_id].append(ended.call)
        return clock() - began

    def _report(self, name: str) -> None:
        """An engine reports what it has computed since its last report; nothing is evicted."""
        self._cursor += 1
        stored = [StoredRun(None, list(call.block_hashes)) for call in self._stored[name]]
        self._stored[name].clear()
        state = CacheState(
            kind="embedded", engine=name, epoch="1", cursor=self._cursor, model=MODEL, block_tokens=16,
            granularity_tokens=BLOCK_TOKENS, snapshot=self.router.engines[name].cache.epoch is None, stored=stored,
            removed=[], kv=KvState(20_000, 10_000, 5_000),
        )  # fmt: skip
        self.router.report(name, state, self._now_s)


def _nothing(_placement: Placement) -> None:
    """Keep nothing of a placement."""


def _prompts(shape: Shape, seed: int) -> Iterator[tuple[Call, float]]:
    """Calls without end, and the share of each prompt that others have too. Hashes are random: only equality counts."""
    dice = random.Random(seed)
    return _calls(shape, dice, _prefixes(shape, dice))


def _prefixes(shape: Shape, dice: random.Random) -> list[array[int]]:
    """The prefixes that prompts share, in random order."""
    leaves = []
    for _ in range(shape.branches):
        mean, deviation = shape.prompt_tokens
        upper = _hashes(dice, max(1, round(0.3 * mean / BLOCK_TOKENS)))
        for _ in range(shape.leaves):
            tokens = shape.shared_share * max(BLOCK_TOKENS * 4, dice.gauss(mean, deviation))
            leaves.append(upper + _hashes(dice, max(1, round(tokens / BLOCK_TOKENS) - len(upper))))
    dice.shuffle(leaves)
    return leaves


def _calls(shape: Shape, dice: random.Random, prefixes: Sequence[array[int]]) -> Iterator[tuple[Call, float]]:
    weights = [rank**-ZIPF for rank in range(1, len(prefixes) + 1)]
    number = 0
    while True:
        for prefix in dice.choices(prefixes, weights, k=1000):
            number += 1
            own_tokens = max(1, round(len(prefix) * BLOCK_TOKENS * (1 / shape.shared_share - 1)))
            hashes = prefix + _hashes(dice, own_tokens // BLOCK_TOKENS)
            tokens = len(prefix) * BLOCK_TOKENS + own_tokens
            yield Call(f"c{number}", MODEL, tokens, BLOCK_TOKENS, hashes), len(prefix) * BLOCK_TOKENS / tokens


def _hashes(dice: random.Random, blocks: int) -> array[int]:
    return array("Q", (dice.getrandbits(64) for _ in range(blocks)))


def _bytes_a_block(shape: Shape, engines: int, policy: str, *, reports: bool) -> float:
    """Memory of a resident block: of the router after all calls have ended and left the window, less an empty one's.

    The prompts' shared prefixes exist before, so they do not count.
    """
    tracemalloc.start()
    fleet = Fleet(shape, engines, policy, 0, reports=reports)
    before, _ = tracemalloc.get_traced_memory()
    fleet.run(WARM_UP_PER_ENGINE * 100)
    fleet.end_all()
    fleet.lengths.clear()
    fleet.shared.clear()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / max(1, len(fleet.router.tree))


def claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """Fixed targets."""
    for engines, target in ((8, 10_000.0), (256, 3_000.0)):
        worst = min((row for row in rows if row.engines == engines), key=lambda row: row.calls_s)
        yield Claim(f"calls a second, {engines} engines", worst.calls_s, least=target, where=_where(worst))
    slow = max(rows, key=lambda row: row.p99_us)
    yield Claim("p99 of a call (us)", slow.p99_us, most=1000, where=_where(slow))
    large = max(rows, key=lambda row: row.bytes_a_block)
    yield Claim("memory of a block (bytes)", large.bytes_a_block, most=150, where=_where(large))


def line_claims(lines: Sequence[LineRow]) -> Iterator[Claim]:
    """What waiting calls may cost."""
    none = {row.shape: row.call_us for row in lines if not row.waiting}
    worst = max((row for row in lines if row.waiting), key=lambda row: row.call_us / none[row.shape])
    times = worst.call_us / none[worst.shape]
    name = f"CPU of a call with {worst.waiting:,} waiting, over that with none"
    yield Claim(name, times, most=MOST_TIMES, where=worst.shape)


def _where(row: Row) -> str:
    return f"{row.shape}, {row.engines} engines, {'reporting' if row.reports else 'not reporting'}"


def markdown(rows: Sequence[Row], lines: Sequence[LineRow]) -> Iterator[str]:
    """The tables."""
    yield from table(
        ["prompts", "engines", "reports", "calls/s", "p99 us", "select us", "book us", "settle us", "blocks",
         "bytes a block", "prompt tokens", "shared"],
        (
            [
                *(row.shape, row.engines, "yes" if row.reports else "no", f"{row.calls_s:,.0f}", f"{row.p99_us:.0f}"),
                *(f"{part_us:.1f}" for part_us in (row.select_us, row.book_us, row.settle_us)),
                *(f"{row.tree_blocks:,}", f"{row.bytes_a_block:.0f}"),
                *("{:,.0f} ({:,.0f})".format(*row.prompt_tokens), f"{row.shared_share:.0%}"),
            ]
            for row in rows
        ),
    )  # fmt: skip
    yield ""
    cells = ([line.shape, f"{line.waiting:,}", f"{line.call_us:.1f}"] for line in lines)
    yield from table([f"prompts, {LINE_ENGINES} engines", "waiting", "us a call"], cells)
    yield ""
    yield f"Preble's global scheduler, as published, calls a second: {PREBLE_CALLS_S}"


if __name__ == "__main__":
    sys.exit(main())
