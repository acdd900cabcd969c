"""Agents whose contexts fill the fleet's KV caches, held and not: `python -m benchmarks agent_sessions --traces DIR`.

In virtual time, with admission as it ships. Each condition is run without holding sessions and with it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from math import exp, inf, log
from pathlib import Path
from statistics import fmean
from typing import Final

import structlog

from benchmarks.holding.closed_loop import ClosedLoop, Condition, Outcome
from benchmarks.holding.conditions import CHEAP_MEAN, GROUPS, Wanted
from e2e.traces import TRACES
from plait.gateway.simulation.compare import Claim

OURS: Final = "plait"
SLOWER: Final = 1.1


@dataclass(frozen=True, slots=True)
class Task:
    """Both runs of a condition with one seed and one placement."""

    name: str
    condition: Condition
    seed: int
    policy: str


@dataclass(frozen=True, slots=True)
class Row:
    """What came of it: without holding, and with it. `slower` is the part of the sessions that takes longer."""

    name: str
    seed: int
    policy: str
    without: Outcome
    held: Outcome

    def ratio(self, of: Callable[[Outcome], float]) -> float:
        """A figure with holding, over that without."""
        return of(self.held) / of(self.without)

    @property
    def slower(self) -> float:
        """The part of the sessions that takes more than a tenth longer."""
        pairs = zip(self.held.sessions_s, self.without.sessions_s, strict=True)
        return fmean(held_s > SLOWER * without_s for held_s, without_s in pairs)


def main() -> int:
    """Run, print, write; returns 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=["full"], help="default: full")
    parser.add_argument("--only", nargs="+", metavar="CONDITION", help="only those whose names begin so")
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3), help="default: 1 2 3")
    parser.add_argument("--policies", nargs="+", default=[OURS], help="placements; default: plait")
    parser.add_argument("--processes", type=int, default=2, help="default: 2")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    arguments = parser.parse_args()
    chosen = {name: given for group in arguments.groups for name, given in GROUPS[group].items()}
    if arguments.only:
        chosen = {name: given for name, given in chosen.items() if name.startswith(tuple(arguments.only))}
    tasks = [
        Task(name, condition, seed, policy)
        for policy in arguments.policies
        for name, (condition, _) in chosen.items()
        for seed in arguments.seeds
    ]
    rows = _rows(arguments.traces, tasks, arguments.processes)
    for policy in arguments.policies:
        _print(policy, [row for row in rows if row.policy == policy])
    ours = [row for row in rows if row.policy == OURS]
    made = list(claims(ours, {name: wanted for name, (_, wanted) in chosen.items()}))
    for claim in made:
        print(f"- {'holds' if claim.holds else 'FAILS'}: {claim.name} = {claim.value:.3f}, wanted {claim.target}")
    if arguments.json is not None:
        report = {"results": [asdict(row) for row in rows], "claims": [asdict(claim) for claim in made]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(not all(claim.holds for claim in made))


def _rows(traces: Path, tasks: Sequence[Task], processes: int) -> list[Row]:
    with ProcessPoolExecutor(processes) as pool:
        running = {pool.submit(run, traces, task): task for task in tasks}
        for done, future in enumerate(as_completed(running), start=1):
            print(f"\r{done} of {len(tasks)}: {running[future].name:<50}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return [future.result() for future in running]


def run(traces: Path, task: Task) -> Row:
    """Both runs. Where the capacity is wrong, tenants are told apart or gateways share the sessions, the first one is
    held, too, without that.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    condition = task.condition
    plain = replace(condition, told=1.0, is_fair=False, gateways=1)
    without = ClosedLoop(traces, plain, task.seed, policy=task.policy, gate=plain != condition).run()
    held = ClosedLoop(traces, condition, task.seed, policy=task.policy).run()
    return Row(task.name, task.seed, task.policy, without, held)


def _print(policy: str, rows: Sequence[Row]) -> None:
    print(
        f"\n{policy}\n\n| condition | session, s | p99, s | slower | hit rate | TPOT, ms | chat's TTFT, s | refused |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in dict.fromkeys(row.name for row in rows):
        found = [row for row in rows if row.name == name]
        cells = [
            _both(found, lambda one: one.mean_s, "{:.0f}"),
            _both(found, lambda one: one.p99_s, "{:.0f}"),
            f"{fmean(row.slower for row in found):.0%}",
            _both(found, lambda one: one.hit_rate, "{:.2f}"),
            _both(found, lambda one: 1e3 * one.tpot_s, "{:.0f}"),
            _both(found, lambda one: one.ttft_s, "{:.2f}") if found[0].held.ttfts_s else "",
            f"{sum(row.without.refused for row in found)}, {sum(row.held.refused for row in found)}",
        ]
        print(f"| {name} | {' | '.join(cells)} |")


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
            if most < inf and found:
                value = value_of(found)
                yield Claim(f"{figure}, {name}", value, f"<= {most:g}", value <= most)
    cheap = [row.ratio(lambda one: one.mean_s) for row in rows if row.name in GROUPS["cheap"]]
    if cheap:
        yield Claim("mean of the cheap ones", _geometric(cheap), f"<= {CHEAP_MEAN:g}", _geometric(cheap) <= CHEAP_MEAN)


def _ratio(rows: Sequence[Row], of: Callable[[Outcome], float]) -> float:
    return _geometric([row.ratio(of) for row in rows])


def _geometric(ratios: Sequence[float]) -> float:
    return exp(fmean(map(log, ratios)))


FIGURES: Final[Mapping[str, Callable[[Sequence[Row]], float]]] = {
    "mean": lambda rows: _ratio(rows, lambda one: one.mean_s),
    "p99": lambda rows: _ratio(rows, lambda one: one.p99_s),
    "slower": lambda rows: fmean(row.slower for row in rows),
    "chat": lambda rows: _ratio(rows, lambda one: one.ttft_s),
    "other": lambda rows: _ratio(rows, lambda one: one.other_mean_s),
    "other_wait_s": lambda rows: max(row.held.other_longest_wait_s for row in rows),
}
"""By the names of what is `Wanted`."""


if __name__ == "__main__":
    sys.exit(main())
