"""What admission does to a full fleet, in virtual time: `python -m benchmarks full_fleet [--json PATH] [--quick]`.

The same calls on the same engines, without admission, by round robin, and with admission. First all calls come at once.
The most calls a second that a system completes then is the workload's saturation. Then calls come as an open loop at
shares of the saturation, and beyond it. A workload whose trace is missing is skipped. `--live` asks questions on the
documents in real time instead: four embedded engines behind a gateway with the configuration that ships. `--tenants`
has three tenants, one of which sends twenty times as much; with `--live`, in real time. `--refusals` says how true
`Retry-After` is. `--promises` promises times to short calls beside long prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.filling import live_tenants, promise_report, promises, tenant_report, tenants
from benchmarks.filling.claims import claims
from benchmarks.filling.live import run_live
from benchmarks.filling.refusals import CHAT, measure
from benchmarks.filling.report import markdown, rows
from benchmarks.filling.runs import LOADS, Plan, Results, Runner, Task
from benchmarks.filling.systems import DEFAULT, NONE, FleetSize, systems
from benchmarks.filling.workloads import missing, workloads
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, merged
from e2e.traces import TRACES
from plait.policy.types import Objective

SEEDS: Final = (1, 2)
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
    modes = (
        (arguments.tenants and arguments.live, _live_tenants),
        (arguments.tenants, lambda asked: conduct("full_fleet", _tenants(asked), asked)),
        (arguments.live, _live_documents),
        (arguments.refusals, _refusals),
        (arguments.promises is not None, lambda asked: conduct("full_fleet", _promises(asked), asked)),
        (True, lambda asked: conduct("full_fleet", _loads(asked), asked)),
    )
    return next(run_mode for is_asked, run_mode in modes if is_asked)(arguments)


def _live_documents(arguments: argparse.Namespace) -> int:
    """Run and print; returns 1 if a call was lost."""
    figures = run_live(arguments.rate, arguments.seconds or SECONDS, arguments.seeds[0])
    print(json.dumps(asdict(figures)))
    return int(bool(figures.lost))


def _loads(arguments: argparse.Namespace) -> Experiment[Task, Results]:
    """All workloads at all loads. A workload whose trace is missing is left out."""
    skipped = {name: file for name, file in missing(arguments.traces).items() if name in arguments.workloads}
    plan = _plan(arguments)
    tasks = [(name, seed) for name in arguments.workloads if name not in skipped for seed in arguments.seeds]

    def report(found: Mapping[Task, Results]) -> Report:
        results = merged(found)
        return Report(
            lines=[f"skipped: {name}, no {file}" for name, file in skipped.items()] + list(markdown(results)),
            claims=list(claims(results)),
            results=rows(results),
            inputs={**asdict(plan), "skipped": skipped},
        )

    return Experiment(tasks, NewRunner(plan), report)


def _tenants(arguments: argparse.Namespace) -> Experiment[tenants.Contest, tenants.TenantFigures]:
    """Each contest, and the one that it is compared with."""
    asked = list(_contests(arguments))
    contests = list(dict.fromkeys(contest for one in asked for contest in (one.base, one)))
    return Experiment(contests, tenants_runner, tenant_report.report)


def _live_tenants(arguments: argparse.Namespace) -> int:
    """Run and print one load after the other; returns 1 if a light tenant has lost a call."""
    found = 0
    for contest in _contests(arguments):
        figures = live_tenants.run_live(contest)
        print(json.dumps({"load": contest.load, **asdict(figures)}), flush=True)
        found |= bool(figures.light_lost)
    return found


def _contests(arguments: argparse.Namespace) -> Iterator[tenants.Contest]:
    """Those that are asked for, by load and seed. A flood of one's own calls is small, beside long ones."""
    contest = tenants.Contest(
        shape="long" if arguments.own_flood else arguments.shape,
        load=0.0,
        seconds=arguments.seconds or (SECONDS if arguments.live else tenants.SECONDS),
        seed=0,
        engines=arguments.engines,
        flood="small" if arguments.own_flood else arguments.flood,
        ttft_s=arguments.ttft,
        jct_s=arguments.jct,
        light_ttft_s=arguments.light_ttft,
        objective=None if arguments.objective is None else Objective(arguments.objective),
        fair=not (arguments.one_tenant or arguments.own_flood or arguments.conversations),
        conversations=arguments.conversations,
    )
    for load in arguments.loads or (tenants.LOAD,):
        for seed in arguments.seeds:
            yield replace(contest, load=load, seed=seed)


def tenants_runner(_traces: Path) -> Callable[[tenants.Contest], tenants.TenantFigures]:
    """Runs contests."""
    return tenants.run_tenants


def _refusals(arguments: argparse.Namespace) -> int:
    """Run and print one workload after the other; returns 1 if what is said is not true."""
    found = 0
    for workload in (CHAT, *arguments.workloads):
        seconds = arguments.seconds or SECONDS
        truth = measure(workload, arguments.traces, seconds, arguments.seeds[0], arguments.engines)
        print(json.dumps({"workload": workload, **asdict(truth)}), flush=True)
        found |= not truth.holds
    return found


def _promises(arguments: argparse.Namespace) -> Experiment[promises.Task, promises.Results]:
    """Every promise, for each kind of callers and each seed."""
    plan = promises.Plan(
        fleet=FleetSize(engines=arguments.engines),
        systems=tuple(arguments.systems or promises.SYSTEMS),
        loads=tuple(arguments.loads or promises.LOADS),
        seconds=arguments.seconds or promises.SECONDS,
        contexts=arguments.contexts,
    )
    names = arguments.promises or promises.PROMISES
    tasks = [(name, callers, seed) for name in names for callers in arguments.callers for seed in arguments.seeds]
    return Experiment(tasks, partial(promises.Runner, plan), partial(promise_report.report, plan))


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
    made = parser(__doc__, quick=f"{QUICK_CALLS} calls: shows that it runs", seeds=SEEDS)
    made.add_argument("--workloads", nargs="+", choices=every, default=every, help="default: all")
    made.add_argument("--systems", nargs="+", choices=known, help=f"default: {', '.join(DEFAULT)}; {NONE} always")
    made.add_argument("--loads", type=float, nargs="+", help="in the saturation; up to 1 or beyond")
    made.add_argument("--calls", type=int, default=800, help="of a run at least, up to load 1 (default: %(default)s)")
    made.add_argument("--engines", type=int, default=4, help="default: %(default)s")
    made.add_argument("--warm-up", type=float, default=0.0, metavar="SHARE",
                      help="of the first calls, which do not count up to load 1 (default: %(default)s)")  # fmt: skip
    live = made.add_argument_group("in real time")
    live.add_argument("--live", action="store_true", help="real processes and sockets: documents, or tenants")
    live.add_argument("--rate", type=float, default=3.0, help="questions a second (default: %(default)s)")
    shared = made.add_argument_group("tenants")
    shared.add_argument("--tenants", action="store_true", help="three tenants, one of which sends twenty times as much")
    shared.add_argument("--shape", choices=tenants.SHAPES, default="chat", help="of all calls (default: %(default)s)")
    shared.add_argument(
        "--flood", choices=tenants.SHAPES, help="of the heavy tenant's calls, if they have another shape"
    )
    shared.add_argument("--ttft", type=float, metavar="S", help="a TTFT for each call of the heavy tenant")
    shared.add_argument("--jct", type=float, metavar="S", help="a JCT for each call of the heavy tenant")
    shared.add_argument("--light-ttft", type=float, metavar="S", help="a TTFT for each call of the other tenants")
    shared.add_argument("--objective", choices=[*Objective], help="for each call of the heavy tenant")
    shared.add_argument("--own-flood", action="store_true", help="one tenant's small calls beside its own long ones")
    shared.add_argument("--conversations", action="store_true", help="the tenants are conversations of one tenant")
    shared.add_argument("--one-tenant", action="store_true", help="no fairness: all calls are one tenant's")
    made.add_argument("--seconds", type=float, help=f"default: {SECONDS:g}; in virtual time, {tenants.SECONDS:g}")
    promised = made.add_argument_group("promises")
    promised.add_argument("--promises", nargs="*", choices=promises.PROMISES, help="default: all")
    promised.add_argument("--callers", nargs="+", choices=promises.CALLERS, default=promises.CALLERS,
                          help="default: all")  # fmt: skip
    promised.add_argument("--contexts", type=int, default=0, help="so many long prompts; default: each call's own")
    made.add_argument("--refusals", action="store_true", help="how true Retry-After is, in virtual time")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
