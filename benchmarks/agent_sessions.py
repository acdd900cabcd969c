"""Agents whose contexts fill the fleet's KV caches, held and not: `python -m benchmarks agent_sessions`.

In virtual time, with admission as it ships. Each condition is run without holding sessions and with it, and where chat
comes beside, also with a cap on the sessions that are there (`ClosedLoop`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, inf, log
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import structlog

from benchmarks.holding.closed_loop import ClosedLoop, Condition, Outcome
from benchmarks.holding.conditions import CHEAP_MEAN, GROUPS, Wanted
from benchmarks.placing.workloads import AGENTS_FILE
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.lab.simulation.claim import Claim

OURS: Final = "plait"
SLOWER: Final = 1.1


@dataclass(frozen=True, slots=True)
class Task:
    """The runs of a condition with one seed and one placement."""

    name: str
    condition: Condition
    seed: int
    policy: str
    with_cap: bool = False
    """Whether chat beside agents is run with a cap, too."""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of it: without holding, with it, and with a cap instead, if that was run."""

    name: str
    seed: int
    policy: str
    without: Outcome
    held: Outcome
    capped: Outcome | None = None

    def ratio(self, of: Callable[[Outcome], float]) -> float:
        """A figure with holding, over that without."""
        return of(self.held) / of(self.without)

    def over_cap(self, of: Callable[[Outcome], float]) -> float:
        """A figure with holding, over that with a cap."""
        assert self.capped is not None
        return of(self.held) / of(self.capped)

    @property
    def slower(self) -> float:
        """The part of the sessions that takes more than a tenth longer."""
        pairs = zip(self.held.sessions_s, self.without.sessions_s, strict=True)
        return fmean(held_s > SLOWER * without_s for held_s, without_s in pairs)


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, seeds=(1, 2, 3))
    made.add_argument("--groups", nargs="+", choices=GROUPS, default=["full"], help="default: full")
    made.add_argument("--only", nargs="+", metavar="CONDITION", help="only those whose names begin so")
    made.add_argument("--policies", nargs="+", default=[OURS], help="placements; default: plait")
    arguments = made.parse_args()
    chosen = {name: given for group in arguments.groups for name, given in GROUPS[group].items()}
    if arguments.only:
        chosen = {name: given for name, given in chosen.items() if name.startswith(tuple(arguments.only))}
    tasks = [
        Task(name, condition, seed, policy, with_cap=True)
        for policy in arguments.policies
        for name, (condition, _) in chosen.items()
        for seed in arguments.seeds
    ]
    wanted_of = {name: wanted for name, (_, wanted) in chosen.items()}
    experiment = Experiment(tasks, new_runner, lambda found: report([*found.values()], wanted_of), [AGENTS_FILE])
    return conduct("agent_sessions", experiment, arguments)


def new_runner(traces: Path) -> Callable[[Task], Row]:
    """Make what runs a task."""
    return partial(run, traces)


def report(rows: Sequence[Row], wanted_of: Mapping[str, Wanted]) -> Report:
    """A table for each policy. The claims are of ours."""
    policies = dict.fromkeys(row.policy for row in rows)
    return Report(
        lines=[line for name in policies for line in _markdown(name, [row for row in rows if row.policy == name])],
        claims=list(claims([row for row in rows if row.policy == OURS], wanted_of)),
        results=[found for row in rows for found in _results(row)],
    )


def _results(row: Row) -> Iterator[dict[str, Any]]:
    """The means of each run."""
    for system, one in (("without", row.without), ("capped", row.capped), ("held", row.held)):
        if one is not None:
            chat = {"chat_ttft_s": one.ttft_s} if one.ttfts_s else {}
            yield {"condition": row.name, "seed": row.seed, "policy": row.policy, "system": system,
                   "session_s": one.mean_s, "session_p99_s": one.p99_s, "hit_rate": one.hit_rate,
                   "tpot_s": one.tpot_s, **chat}  # fmt: skip


def run(traces: Path, task: Task) -> Row:
    """All runs. Where the capacity is wrong, tenants are told apart or gateways share the sessions, the first one is
    held, too, without that.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    condition = task.condition
    plain = replace(condition, told=1.0, is_fair=False, gateways=1)
    without = ClosedLoop(traces, plain, task.seed, policy=task.policy, gate=plain != condition).run()
    held = ClosedLoop(traces, condition, task.seed, policy=task.policy).run()
    capped = None
    if task.with_cap and condition.chat is not None:
        capped = ClosedLoop(traces, condition, task.seed, policy=task.policy, gate=False, cap=True).run()
    return Row(task.name, task.seed, task.policy, without, held, capped)


def _markdown(policy: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"### {policy}\n"
    yield from table(
        ["condition", "session, s", "p99, s", "slower", "hit rate", "TPOT, ms", "chat's TTFT, s", "refused"],
        (_cells(name, [row for row in rows if row.name == name]) for name in dict.fromkeys(row.name for row in rows)),
    )
    yield ""


def _cells(name: str, found: Sequence[Row]) -> list[str]:
    return [
        name,
        _both(found, lambda one: one.mean_s, "{:.0f}"),
        _both(found, lambda one: one.p99_s, "{:.0f}"),
        f"{fmean(row.slower for row in found):.0%}",
        _both(found, lambda one: one.hit_rate, "{:.2f}"),
        _both(found, lambda one: 1e3 * one.tpot_s, "{:.0f}"),
        _both(found, lambda one: one.ttft_s, "{:.2f}") if found[0].held.ttfts_s else "",
        f"{sum(row.without.refused for row in found)}, {sum(row.held.refused for row in found)}",
    ]


def _both(rows: Sequence[Row], of: Callable[[Outcome], float], form: str) -> str:
    """The means without and with holding, and the geometric mean of the ratios."""
    means = (fmean(of(getattr(row, which)) for row in rows) for which in ("without", "held"))
    return f"{', '.join(map(form.format, means))} ({_ratio(rows, of):.3f})"


def claims(rows: Sequence[Row], wanted_of: Mapping[str, Wanted]) -> Iterator[Claim]:
    """What is wanted of each condition, by its name."""
    for name, wanted in wanted_of.items():
        found = [row for row in rows if row.name == name]
        for figure, value_of in FIGURES.items():
            most = getattr(wanted, figure)
            is_over_cap = figure.endswith("_over_cap")
            if most < inf and found and not (is_over_cap and found[0].capped is None):
                excused = _knows_more(found) if is_over_cap else ""
                yield Claim(f"{figure}, {name}", value_of(found), most=most, excused=excused)
    cheap = [row.ratio(lambda one: one.mean_s) for row in rows if row.name in GROUPS["cheap"]]
    if cheap:
        yield Claim("mean of the cheap ones", _geometric(cheap), most=CHEAP_MEAN)


def _knows_more(rows: Sequence[Row]) -> str:
    """What the cap does with what it knows."""
    held, capped = (
        fmean(one.hit_rate for one in runs if one) for runs in zip(*((r.held, r.capped) for r in rows), strict=True)
    )
    return (
        f"Measured: the cap knows each session's contexts beforehand and finds {capped:.2f} of the prompts cached, the "
        f"gate learns them and finds {held:.2f}."
    )


def _ratio(rows: Sequence[Row], of: Callable[[Outcome], float]) -> float:
    return _geometric([row.ratio(of) for row in rows])


def _geometric(ratios: Sequence[float]) -> float:
    return exp(fmean(map(log, ratios)))


FIGURES: Final[Mapping[str, Callable[[Sequence[Row]], float]]] = {
    "mean": lambda rows: _ratio(rows, lambda one: one.mean_s),
    "p99": lambda rows: _ratio(rows, lambda one: one.p99_s),
    "slower": lambda rows: fmean(row.slower for row in rows),
    "chat": lambda rows: _ratio(rows, lambda one: one.ttft_s),
    "mean_over_cap": lambda rows: _geometric([row.over_cap(lambda one: one.mean_s) for row in rows]),
    "chat_over_cap": lambda rows: _geometric([row.over_cap(lambda one: one.ttft_s) for row in rows]),
    "other": lambda rows: _ratio(rows, lambda one: one.other_mean_s),
    "other_wait_s": lambda rows: max(row.held.other_longest_wait_s for row in rows),
}
"""By the names of what is `Wanted`."""


if __name__ == "__main__":
    sys.exit(main())
