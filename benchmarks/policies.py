"""Placement policies, ours and what others ship, on many workloads in virtual time: `python -m benchmarks policies`.

The router, admission as it ships and the engine cores are the real ones. First all calls come at once; then they come
at shares of what round robin, or the best policy, completes a second in that case. Agents come in a closed loop.
Fleets with several gateways, with engines of two speeds, told and not, and with one that comes with an empty cache
are run with the strongest rivals and fewer seeds, and so are larger ones. With `--results FILE` each finished part is
kept there, and a run that was cut off goes on. The seeds from 100 on are those that are reported; what is tuned is
tuned on others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Final

from benchmarks.placing.policy_intervals import INTERVALS, interval_claims, interval_table, intervals
from benchmarks.placing.policy_report import claims, markdown, means, plot
from benchmarks.placing.policy_runs import (
    AGENTS,
    BOUNDS,
    COMES_COLD,
    FLEETS,
    KNOWN,
    LARGE_FLEET,
    OURS,
    PLAIN,
    PLAIN_ENGINES,
    POLICIES,
    Plan,
    Runner,
    Runs,
    Task,
    policy_of,
)
from benchmarks.placing.workloads import open_loops
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report
from e2e.traces import TRACES

SEEDS: Final = (100, 101, 102, 103, 104)
FEWER_SEEDS, LEAST_SEEDS = 3, 1
"""Seeds for fleets other than `ENGINES` equal engines behind one gateway, and for large ones."""
ENGINES: Final = PLAIN_ENGINES
LARGER: Final = {8: ("tools", "documents", "mix"), 64: ("tools", "documents", "mix")}
"""The workloads that larger fleets are run with, too."""
COMING: Final = ("video", "loogle", "documents")
SPEEDS: Final = ("documents", "tools", "video")
VARIED: Final = {
    "2 gateways": COMING,
    "4 gateways": COMING,
    "half 3 times faster, told": SPEEDS,
    "half 3 times faster, not told": SPEEDS,
    COMES_COLD: ("documents", "tools"),
}
"""The workloads that fleets of `ENGINES` are run with where something differs."""


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    arguments = _arguments()
    policies = tuple(dict.fromkeys((OURS, *arguments.policies)))
    are_named = arguments.policies != list(POLICIES)
    plan = Plan(policies, arguments.calls, not arguments.no_admission, every_rival=arguments.full or are_named)
    experiment = Experiment(list(_tasks(arguments)), partial(Runner, plan), partial(_report, plan))
    return conduct("policies", experiment, arguments)


def _report(plan: Plan, results: Mapping[Task, Runs]) -> Report:
    found = means(results)
    seeds = {
        cell: [task.seed for task in results if (task.workload, task.engines, task.fleet) == cell.place]
        for cell in found
    }
    by_figure = {figure: intervals(results, figure) for figure in INTERVALS}
    return Report(
        lines=[*markdown(found), *interval_table(by_figure)],
        claims=[*claims(found), *interval_claims(by_figure)],
        results=[
            {
                **asdict(cell),
                "seeds": seeds[cell],
                "policies": by_policy,
                "over_best": {name: asdict(by_cell[cell]) for name, by_cell in by_figure.items() if cell in by_cell},
            }
            for cell, by_policy in found.items()
        ],
        inputs=asdict(plan),
        plot=partial(plot, found),
    )


def _tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    for engines in arguments.engines:
        for workload in arguments.workloads:
            if workload in LARGER.get(engines, arguments.workloads) or arguments.full:
                for fleet in arguments.fleets:
                    if fleet == PLAIN or (engines == ENGINES and workload in VARIED[fleet]):
                        for seed in arguments.seeds[: _seeds(arguments, engines, fleet)]:
                            yield Task(workload, engines, seed, fleet)


def _named(name: str) -> str:
    try:
        policy_of(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _seeds(arguments: argparse.Namespace, engines: int, fleet: str) -> int:
    """How many of the seeds."""
    if arguments.full or (engines, fleet) == (ENGINES, PLAIN):
        return len(arguments.seeds)
    return FEWER_SEEDS if engines <= LARGE_FLEET else LEAST_SEEDS


def _arguments() -> argparse.Namespace:
    every: Sequence[str] = [*open_loops(TRACES), AGENTS]
    made = parser(__doc__, seeds=SEEDS, plots=True)
    made.add_argument("--workloads", nargs="+", choices=every, default=every, help="default: all")
    known = ", ".join((*KNOWN, *BOUNDS))
    made.add_argument("--policies", nargs="+", type=_named, default=list(POLICIES), metavar="POLICY",
                      help=f"of {known}, or package.module:name; default: all but the bounds")  # fmt: skip
    made.add_argument("--engines", nargs="+", type=int, default=[ENGINES, *LARGER], help="default: %(default)s")
    made.add_argument("--fleets", nargs="+", choices=FLEETS, default=list(FLEETS), metavar="FLEET",
                      help=f"'' (equal engines, one gateway), {', '.join(VARIED)}; default: all")  # fmt: skip
    made.add_argument("--full", action="store_true", help="all workloads, seeds and policies on all fleets")
    made.add_argument("--calls", type=int, default=150, help="of a run, by engine (default: %(default)s)")
    made.add_argument("--no-admission", action="store_true", help="each call is placed and sent as it comes")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
