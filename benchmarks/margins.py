"""What a placement's margin is worth, in virtual time: `python -m benchmarks margins [--json PATH] [--quick]`.

The margin is what the next best engine costs more than the chosen one, as the policy predicts it. Each of some calls
is replayed on its next best engine, and the delays of all calls are compared (`benchmarks/placing/replays.py`).

Calls that come within 2 s count. The cost counts what a call adds to those that come while it waits and is computed,
which mostly takes from .1 to 4 s; LooGLE's calls take 15. With a longer window, other placements of later calls move
the sum by more than the one call does.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from statistics import correlation, fmean
from typing import Final

from benchmarks.filling.workloads import Workload
from benchmarks.mixed_prompts import LONG_FILE
from benchmarks.placing.preble_workloads import Sessions, programming, tool_use
from benchmarks.placing.replays import WINDOWS_S, Decision, Recorder, Replay, delays_s, replay, run
from benchmarks.placing.workloads import chat, open_loops
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.simulate import SimulatedCall

TUNED: Final = ("documents", "tools", "video", "loogle", "mooncake")
"""Workloads that the constants of the cost were chosen on, with other seeds. On the others, nothing was."""
SIZES: Final = (4, 8)
LOADS: Final = (0.85, 0.95)
"""Shares of the calls a second that `plait` completes if all come at once."""
FIRST_SEED: Final = 7001
CALLS_AN_ENGINE: Final = 75
FROM, TO = 0.25, 0.75
"""The replayed calls are between these shares of a run, so that caches are full before, and calls come after."""
DECISIONS: Final = 13
QUICK: Final = ("tools", "tool use")
QUICK_EXCUSE: Final = "Near saturation, what short prompts delay is predicted too low; a quick run has nothing else."

WINDOW: Final = WINDOWS_S.index(2.0)
WITHIN: Final = (0.65, 1.5)
CORRELATION: Final = 0.6
WRONG: Final = 0.06
LARGE, BETWEEN, SMALL = BANDS = ("margin >= cost", "between", "margin < cost / 10")
"""By the margin and the cost of the chosen engine."""


@dataclass(frozen=True, slots=True)
class Task:
    """A run of which some decisions are replayed. `load` is a share of what `plait` completes if all come at once."""

    workload: str
    engines: int
    load: float
    seed: int

    def __str__(self) -> str:
        return f"{self.workload}, {self.engines} engines, {self.load:g}"


@dataclass(frozen=True, slots=True)
class Found:
    """The replays of a run, and the mean TTFT and E2E of its calls, added up."""

    replays: tuple[Replay, ...]
    delay_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """So many `decisions` of a run are replayed."""

    decisions: int
    calls_an_engine: int = CALLS_AN_ENGINE


class Runner:
    """Runs tasks."""

    def __init__(self, plan: Plan, traces: Path) -> None:
        self._plan = plan
        self._workloads = workloads(traces)

    def __call__(self, task: Task) -> Found:
        """The replays of a run."""
        workload, calls = self._workloads[task.workload], self._plan.calls_an_engine * task.engines
        at_once = run(task.engines, workload(calls, inf, task.seed), Recorder(()).policy)
        rate_per_s = task.load * calls / max(record.finished_s for record in at_once)
        coming = workload(calls, rate_per_s, task.seed)
        first, last = round(FROM * calls), round(TO * calls)
        recorder = Recorder(range(first, last, -(-(last - first) // self._plan.decisions)))
        base = run(task.engines, coming, recorder.policy)
        found = tuple(replay(task.engines, coming, base, decision) for decision in recorder.decisions)
        return Found(found, delays_s(base[first:]) / (calls - first))


def workloads(traces: Path) -> dict[str, Workload]:
    """Calls in an open loop, by the workload's name."""
    known = {name: made for name, made in open_loops(traces).items() if name in TUNED}
    return {**known, "chat": chat, "tool use": partial(_single, tool_use), "programming": partial(_single, programming)}


def tasks(names: Sequence[str]) -> Iterator[Task]:
    """Each workload on few engines and on more, one of them under the higher load."""
    for number, name in enumerate(names):
        loads = LOADS if number % 2 else LOADS[::-1]
        for engines, load in zip(SIZES, loads, strict=True):
            yield Task(name, engines, load, FIRST_SEED + number)


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, quick="two workloads on 4 engines")
    every = list(workloads(made.get_default("traces")))
    made.add_argument("--workloads", nargs="+", choices=every, help="default: all")
    made.add_argument("--decisions", type=int, default=DECISIONS, help="of a run (default: %(default)s)")
    arguments = made.parse_args()
    names = arguments.workloads or (QUICK if arguments.quick else every)
    chosen = [task for task in tasks(every) if task.workload in names]
    if arguments.quick:
        chosen = [task for task in chosen if task.engines == SIZES[0]]
    files = [LONG_FILE] if any(task.workload == "mooncake" for task in chosen) else []
    told = partial(report, excused=QUICK_EXCUSE * arguments.quick)
    return conduct("margins", Experiment(chosen, partial(Runner, Plan(arguments.decisions)), told, files), arguments)


def report(results: Mapping[Task, Found], excused: str = "") -> Report:
    """A row for each run, for each window, and for each decision."""
    every = [one for found in results.values() for one in found.replays]
    delay_s = fmean(found.delay_s for found in results.values() for _ in found.replays)
    rows = [[str(task), *cells(found.replays)] for task, found in results.items()]
    return Report(
        lines=[
            *table(["workload, engines, load", *COLUMNS], [*rows, ["all", *cells(every)]]),
            "",
            *table(
                ["calls until", *COLUMNS, "regret"], (window_row(every, at, delay_s) for at in range(len(WINDOWS_S)))
            ),
            "",
            *table(["predicted / replayed, s", *PARTS], part_rows(results)),
            "",
            by_run([found.replays for found in results.values()]),
        ],
        claims=list(claims(every, excused)),
        results=[{**asdict(task), **asdict(one)} for task, found in results.items() for one in found.replays],
        inputs={"windows_s": WINDOWS_S},
    )


def claims(replays: Sequence[Replay], excused: str = "") -> Iterator[Claim]:
    """The margin is right on average, which may be `excused`, and in order, and a large one is seldom wrong."""
    least, most = WITHIN
    yield Claim("mean margin / replayed", ratio(replays), least=least, most=most, excused=excused)
    yield Claim("rank correlation of margin and replayed", rank_correlation(replays), least=CORRELATION)
    wrong = share_wrong(in_band(replays, LARGE))
    yield Claim(f"next best engine better, {LARGE}", wrong, most=WRONG)


COLUMNS: Final = ("decisions", "margin, s", "replayed, s", "margin / replayed", "rank correlation",
                  *(f"next best better, {band}" for band in BANDS))  # fmt: skip


def cells(replays: Sequence[Replay], window: int = WINDOW) -> list[str]:
    """The cells of `COLUMNS`."""
    bands = [in_band(replays, band) for band in BANDS]
    return [
        str(len(replays)),
        f"{fmean(one.decision.margin.total_s for one in replays):.2f}",
        f"{fmean(one.more[window].total_s for one in replays):.2f}",
        f"{ratio(replays, window):.2f}",
        f"{rank_correlation(replays, window):.2f}",
        *(f"{sum(one.more[window].total_s < 0 for one in those)} of {len(those)}" for those in bands),
    ]


def window_row(replays: Sequence[Replay], window: int, delay_s: float) -> list[str]:
    """The figures for a window, and what always knowing the better of the two engines would gain at most."""
    regret_s = fmean(max(0.0, -one.more[window].total_s) for one in replays)
    regret = f"{regret_s:.2f} s ({regret_s / delay_s:.1%})"
    return [f"{WINDOWS_S[window]:g} s after", *cells(replays, window), regret]


def by_run(runs: Sequence[Sequence[Replay]]) -> str:
    """In how many runs the claims of all decisions hold: those with large margins count for most of the means."""
    least, most = WITHIN
    right = sum(least <= ratio(some) <= most for some in runs)
    ordered = sum(rank_correlation(some) >= CORRELATION for some in runs)
    return (
        f"Of {len(runs)} runs, {right} have a margin / replayed from {least} to {most}, "
        f"and {ordered} a rank correlation of at least {CORRELATION}."
    )


PARTS: Final = ("the call itself", "calls that are there", "later calls")


def part_rows(results: Mapping[Task, Found]) -> Iterator[list[str]]:
    """The mean parts of the margin for each workload."""
    by_workload = defaultdict[str, list[Replay]](list)
    for task, found in results.items():
        by_workload[task.workload].extend(found.replays)
    for workload, some in by_workload.items():
        predicted, replayed = (
            [fmean(values) for values in zip(*of, strict=True)]
            for of in ([one.decision.margin for one in some], [one.more[WINDOW] for one in some])
        )
        yield [workload, *(f"{one_s:.2f} / {other_s:.2f}" for one_s, other_s in zip(predicted, replayed, strict=True))]


def in_band(replays: Sequence[Replay], band: str) -> list[Replay]:
    """The replays whose margin is in a band."""
    return [one for one in replays if band_of(one.decision) == band]


def band_of(decision: Decision) -> str:
    """One of `BANDS`."""
    if decision.margin.total_s >= decision.cost_s:
        return LARGE
    return SMALL if decision.margin.total_s < decision.cost_s / 10 else BETWEEN


def share_wrong(replays: Sequence[Replay], window: int = WINDOW) -> float:
    """The share of the decisions in which the next best engine was better."""
    return sum(one.more[window].total_s < 0 for one in replays) / max(1, len(replays))


def ratio(replays: Sequence[Replay], window: int = WINDOW) -> float:
    """The mean margin over what was replayed on average."""
    return fmean(one.decision.margin.total_s for one in replays) / fmean(one.more[window].total_s for one in replays)


def rank_correlation(replays: Sequence[Replay], window: int = WINDOW) -> float:
    """Spearman's."""
    return correlation(
        ranks([one.decision.margin.total_s for one in replays]), ranks([one.more[window].total_s for one in replays])
    )


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value among all; equal ones share theirs."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in values]


def _single(sessions: Sessions, calls: int, rate: float, seed: int) -> list[SimulatedCall]:
    """The calls of sessions of one call each."""
    return list(chain.from_iterable(sessions(calls, rate, seed)))


if __name__ == "__main__":
    sys.exit(main())
