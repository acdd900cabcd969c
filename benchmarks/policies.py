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
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.placing.policy_intervals import INTERVALS, interval_claims, interval_table, intervals
from benchmarks.placing.policy_report import claims, markdown, means, plot
from benchmarks.placing.policy_runs import (
    AGENTS,
    COMES_COLD,
    FLEETS,
    LARGE_FLEET,
    OURS,
    PLAIN,
    PLAIN_ENGINES,
    POLICIES,
    Figures,
    Plan,
    Runner,
    Runs,
    Task,
)
from benchmarks.placing.workloads import open_loops
from benchmarks.schedulers.sweep import Progress
from benchmarks.workers import run_all
from e2e.traces import TRACES

REPORTED_SEED: Final = 100
SEEDS: Final = 5
FEWER_SEEDS, LEAST_SEEDS = 3, 1
"""Of fleets other than `ENGINES` equal engines behind one gateway, and of large ones."""
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
    """Run, print, write; returns 1 if a claim does not hold."""
    arguments = _arguments()
    policies = tuple(dict.fromkeys((OURS, *arguments.policies)))
    plan = Plan(policies, arguments.calls, not arguments.no_admission, every_rival=arguments.full)
    results = _kept(arguments.results)
    tasks = [task for task in _tasks(arguments) if task not in results]
    progress = Progress()
    for done, (task, runs) in enumerate(
        run_all(partial(Runner, plan), arguments.traces, tasks, arguments.jobs), start=1
    ):
        results[task] = runs
        if arguments.results is not None:
            _keep(arguments.results, task, runs)
        progress(done, len(tasks))
    found = means(results)
    by_figure = {figure: intervals(results, figure) for figure in INTERVALS}
    made = [*claims(found), *interval_claims(by_figure)]
    print("\n".join([*markdown(found), *interval_table(by_figure)]))
    for claim in made:
        print(f"- {'holds' if claim.holds else 'FAILS'}: {claim.name} = {claim.value:.3f}, wanted {claim.target}")
    if arguments.json is not None:
        cells = [{**asdict(cell), "policies": by_policy} for cell, by_policy in found.items()]
        seeds = sorted({task.seed for task in results})
        report = {"plan": asdict(plan), "seeds": seeds, "cells": cells, "claims": [asdict(claim) for claim in made]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.plots is not None:
        plot(found, arguments.plots)
    return int(not all(claim.holds for claim in made))


def _tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    for engines in arguments.engines:
        for workload in arguments.workloads:
            if workload in LARGER.get(engines, arguments.workloads) or arguments.full:
                for fleet in arguments.fleets:
                    if fleet == PLAIN or (engines == ENGINES and workload in VARIED[fleet]):
                        for seed in range(_seeds(arguments, engines, fleet)):
                            yield Task(workload, engines, arguments.first_seed + seed, fleet)


def _seeds(arguments: argparse.Namespace, engines: int, fleet: str) -> int:
    seeds: int = arguments.seeds
    if arguments.full or (engines, fleet) == (ENGINES, PLAIN):
        return seeds
    return min(seeds, FEWER_SEEDS if engines <= LARGE_FLEET else LEAST_SEEDS)


def _kept(path: Path | None) -> dict[Task, Runs]:
    """The parts that an earlier run has left."""
    if path is None or not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {
        Task(**line["task"]): {
            load: {policy: Figures(**figures) for policy, figures in by_policy.items()}
            for load, by_policy in line["runs"].items()
        }
        for line in lines
    }


def _keep(path: Path, task: Task, runs: Runs) -> None:
    line = {
        "task": asdict(task),
        "runs": {load: {name: asdict(figures) for name, figures in by.items()} for load, by in runs.items()},
    }
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def _arguments() -> argparse.Namespace:
    every: Sequence[str] = [*open_loops(TRACES), AGENTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="default: %(default)s")
    parser.add_argument("--workloads", nargs="+", choices=every, default=every, help="default: all")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: all")
    parser.add_argument("--engines", nargs="+", type=int, default=[ENGINES, *LARGER], help="default: %(default)s")
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=list(FLEETS), metavar="FLEET",
                        help=f"'' (equal engines, one gateway), {', '.join(VARIED)}; default: all")  # fmt: skip
    parser.add_argument("--full", action="store_true", help="all workloads, seeds and policies on all fleets")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=REPORTED_SEED, help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=150, help="of a run, by engine (default: %(default)s)")
    parser.add_argument("--no-admission", action="store_true", help="each call is placed and sent as it comes")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep finished parts there, and go on from them")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw plots there")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
