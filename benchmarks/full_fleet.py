"""What admission does to a full fleet, in virtual time: `python -m benchmarks full_fleet [--json PATH] [--quick]`.

The same calls on the same engines, without admission, by round robin, and with admission. First all calls come at once.
The most calls a second that a system completes then is the workload's saturation. Then calls come as an open loop at
shares of the saturation, and beyond it. A workload whose trace is missing is skipped. `--live` asks questions on the
documents in real time instead: four embedded engines behind a gateway with the configuration that ships. `--tenants`
has three tenants there, one of which sends twenty times as much, at some loads beyond the saturation. `--refusals` says
how true `Retry-After` is, in virtual time. `--promises` promises times to short calls beside long prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.filling import promise_report, promises
from benchmarks.filling.claims import claims
from benchmarks.filling.live import run_live
from benchmarks.filling.refusals import CHAT, measure
from benchmarks.filling.report import as_json, lines, markdown
from benchmarks.filling.runs import LOADS, Figures, Plan, Point, Results, Runner, Task
from benchmarks.filling.systems import DEFAULT, NONE, FleetSize, systems
from benchmarks.filling.tenants import SHAPES, Contest, run_tenants
from benchmarks.filling.workloads import missing, workloads
from benchmarks.workers import run_all
from e2e.traces import TRACES

SEEDS: Final = 2
QUICK_CALLS: Final = 30
QUICK_S: Final = 2.0
SECONDS: Final = 200.0


@dataclass(frozen=True, slots=True)
class NewRunner:
    """Makes a runner in a worker process."""

    plan: Plan

    def __call__(self, traces: Path) -> Runner:
        """The runner."""
        return Runner(self.plan, traces)


def main() -> int:
    """Run, print, write; returns 1 if a claim does not hold."""
    arguments = _arguments()
    if arguments.live:
        figures = run_live(arguments.rate, arguments.seconds or SECONDS, arguments.first_seed)
        print(json.dumps(asdict(figures)))
        return int(bool(figures.lost))
    if arguments.tenants:
        return _tenants(arguments)
    if arguments.refusals:
        return _refusals(arguments)
    if arguments.promises is not None:
        return _promises(arguments)
    skipped = {name: file for name, file in missing(arguments.traces).items() if name in arguments.workloads}
    for name, file in skipped.items():
        print(f"skipped: {name}, no {file} in {arguments.traces}")
    names = [name for name in arguments.workloads if name not in skipped]
    if not names:
        return 0
    plan = _plan(arguments)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    results = run(plan, arguments.traces, [(name, seed) for name in names for seed in seeds], arguments.jobs)
    made = list(claims(results))
    print("\n".join([*markdown(results), "", *lines(made)]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(plan, results, made, skipped), indent=1) + "\n")
    return int(not all(claim.holds for claim in made))


def _tenants(arguments: argparse.Namespace) -> int:
    """Run and print one load after the other; returns 1 if a light tenant has lost a call."""
    found = 0
    for load in arguments.loads or LOADS:
        contest = Contest(
            shape=arguments.shape,
            load=load,
            seconds=arguments.seconds or SECONDS,
            seed=arguments.first_seed,
            engines=arguments.engines,
            ttft_s=arguments.ttft,
            fair=not arguments.one_tenant,
        )
        figures = run_tenants(contest)
        print(json.dumps({"load": load, **asdict(figures)}), flush=True)
        found |= bool(figures.light_lost)
    return found


def _refusals(arguments: argparse.Namespace) -> int:
    """Run and print one workload after the other; returns 1 if what is said is not true."""
    found = 0
    for workload in (CHAT, *arguments.workloads):
        seconds = arguments.seconds or SECONDS
        truth = measure(workload, arguments.traces, seconds, arguments.first_seed, arguments.engines)
        print(json.dumps({"workload": workload, **asdict(truth)}), flush=True)
        found |= not truth.holds
    return found


def _promises(arguments: argparse.Namespace) -> int:
    """Run, print and write all promises; returns 1 if one is not kept as is wanted."""
    plan = promises.Plan(
        fleet=FleetSize(engines=arguments.engines),
        systems=tuple(arguments.systems or promises.SYSTEMS),
        loads=tuple(arguments.loads or promises.LOADS),
        seconds=arguments.seconds or promises.SECONDS,
        contexts=arguments.contexts,
    )
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    names = arguments.promises or promises.PROMISES
    tasks = [(name, callers, seed) for name in names for callers in arguments.callers for seed in seeds]
    found = dict(run_all(partial(promises.Runner, plan), arguments.traces, tasks, arguments.jobs))
    results = {point: kept for task in tasks for point, kept in found[task].items()}
    made = list(promise_report.claims(results))
    print("\n".join([*promise_report.markdown(results), *lines(made)]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(promise_report.as_json(plan, results, made), indent=1) + "\n")
    return int(not all(claim.holds for claim in made))


def run(plan: Plan, traces: Path, tasks: Sequence[Task], jobs: int) -> Results:
    """The figures of every run, in the order of `tasks`."""
    found: dict[Task, dict[Point, Figures]] = dict(run_all(NewRunner(plan), traces, tasks, jobs))
    return {point: figures for task in tasks for point, figures in found[task].items()}


def _plan(arguments: argparse.Namespace) -> Plan:
    """`none` is always among the systems: the others are compared with it."""
    chosen = tuple(dict.fromkeys((NONE, *(arguments.systems or DEFAULT))))
    plan = Plan(
        systems=chosen,
        fleet=FleetSize(engines=arguments.engines),
        loads=tuple(arguments.loads or LOADS),
        calls=arguments.calls,
        warm_up_share=arguments.warm_up,
    )
    if arguments.quick:
        return replace(plan, calls=QUICK_CALLS, at_once_s=0.0, open_s=QUICK_S, over_s=QUICK_S)
    return plan


def _arguments() -> argparse.Namespace:
    every, known = list(workloads(TRACES)), list(systems(FleetSize()))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    parser.add_argument("--traces", type=Path, default=TRACES, help="default: %(default)s")
    parser.add_argument("--workloads", nargs="+", choices=every, default=every, help="default: all")
    parser.add_argument("--systems", nargs="+", choices=known, help=f"default: {', '.join(DEFAULT)}; {NONE} always")
    parser.add_argument("--loads", type=float, nargs="+", help="in the saturation; up to 1 or beyond")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=800, help="of a run at least, up to load 1 (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--warm-up", type=float, default=0.0, metavar="SHARE",
                        help="of the first calls, which do not count up to load 1 (default: %(default)s)")  # fmt: skip
    live = parser.add_argument_group("in real time")
    live.add_argument("--live", action="store_true", help="real processes and sockets, documents only")
    live.add_argument("--rate", type=float, default=3.0, help="questions a second (default: %(default)s)")
    live.add_argument("--tenants", action="store_true", help="three tenants, one of which sends twenty times as much")
    live.add_argument("--shape", choices=SHAPES, default="chat", help="of the tenants' calls (default: %(default)s)")
    live.add_argument("--ttft", type=float, metavar="S", help="a TTFT for each call of the heavy tenant")
    live.add_argument("--one-tenant", action="store_true", help="no fairness: all calls are one tenant's")
    parser.add_argument("--seconds", type=float, help=f"default: {SECONDS:g}, of promises {promises.SECONDS:g}")
    promised = parser.add_argument_group("promises")
    promised.add_argument("--promises", nargs="*", choices=promises.PROMISES, help="default: all")
    promised.add_argument("--callers", nargs="+", choices=promises.CALLERS, default=promises.CALLERS,
                          help="default: all")  # fmt: skip
    promised.add_argument("--contexts", type=int, default=0, help="so many long prompts; default: each call's own")
    parser.add_argument("--refusals", action="store_true", help="how true Retry-After is, in virtual time")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CALLS} calls: shows that it runs")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
