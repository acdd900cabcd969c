"""The rows of the table: which runs of which experiment each takes, and what is claimed of them.

A row has no harness of its own. It takes the runner and the claims of an experiment that can be run by itself, with
fewer runs if it has to be quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from benchmarks import agent_sessions, estimates, full_fleet, gateways, mixed_prompts, own_order, preble, ranks, windows
from benchmarks.application import sweep
from benchmarks.application.experiments import TRACE_FILES
from benchmarks.claiming import programs, scheduler, through_gateways
from benchmarks.claiming.documents import document_claims
from benchmarks.claiming.placement import PLACEMENT_POLICIES, placement_claims
from benchmarks.filling import promise_report, promises, runs, tenant_report, tenants
from benchmarks.filling.systems import ADMISSION, DEFAULT, NONE, FleetSize
from benchmarks.holding.conditions import GROUPS
from benchmarks.placing import policy_runs
from benchmarks.placing.preble_workloads import WORKLOADS
from benchmarks.placing.workloads import AGENTS_FILE
from benchmarks.running.report import merged
from benchmarks.schedulers import sweep as sweep_of_schedulers
from plait.lab.commands.demo import QUICK_CALLS, TURNS, compared
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.compare import Experiment
from plait.policy.types import Objective

Found = Mapping[Any, Any]
"""The result of each task of a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One experiment: its tasks, what makes their runner from the folder of the traces, and its claims.

    It needs these `files` of that folder. A row of more than five minutes names the part that a task is of; each part
    has claims of its own.
    """

    tasks: Sequence[Any]
    new_runner: Callable[[Path], Callable[[Any], Any]]
    claims: Callable[[Found], Iterator[Claim]]
    files: Sequence[str] = ()
    part_of: Callable[[Any], str] | None = None

    def parts(self) -> dict[str, Row]:
        """Rows of fewer tasks, by name, which have all tasks together."""
        if self.part_of is None:
            return {}
        tasks: dict[str, list[Any]] = {}
        for task in self.tasks:
            tasks.setdefault(self.part_of(task), []).append(task)
        return {part: replace(self, tasks=those) for part, those in tasks.items()}


def with_parts(whole: Mapping[str, Row]) -> dict[str, Row]:
    """The rows and, as `row-part`, the parts of those that have some."""
    return {**whole, **{f"{name}-{part}": made for name, row in whole.items() for part, made in row.parts().items()}}


def rows(*, quick: bool) -> dict[str, Row]:
    """All of them, by name. The one with the longest tasks is first, so that no process is left with one at the end."""
    return {
        "agents": _agents(quick=quick),
        "promises": _promises(quick=quick),
        "tenants": _tenants(quick=quick),
        "order": Row(own_order.tasks_of(quick=quick), own_order.runner, own_order.claims),
        "programs": _programs(quick=quick),
        "prefixes": _prefixes(quick=quick),
        "preble": _preble(quick=quick),
        "scheduler": _scheduler(quick=quick),
        "documents": _documents(quick=quick),
        "gateways": _gateways(quick=quick),
        "unnamed": _unnamed(quick=quick),
        "ranks": _ranks(quick=quick),
        "comparison": _comparison(),
        "estimates": _estimates(quick=quick),
        "windows": _windows(quick=quick),
    }


def _promises(*, quick: bool) -> Row:
    """Short calls with a TTFT, TPOT or JCT, against no admission."""
    plan = promises.Plan(
        fleet=FleetSize(engines=1),
        systems=(NONE, ADMISSION),
        loads=(0.85, 1.0) if quick else (0.5, 0.85, 1.0),
    )
    tasks = [
        (name, callers, seed)
        for name in promises.PROMISES
        for callers in promises.CALLERS
        for seed in ((1,) if quick else (1, 2, 3))
    ]
    return Row(tasks, partial(promises.Runner, plan), lambda found: promise_report.claims(merged(found)))


def _tenants(*, quick: bool) -> Row:
    """A heavy tenant with small calls, a TTFT or an objective, against a plain one; and a flood of one's own calls.

    On one engine, the others' TTFTs beside a heavy tenant with JCTs.

    Calls a second and the longest wait move by a tenth from seed to seed: a quick run has the light tenants only. Of
    some 80 light calls with tool lists the p99 is nearly the slowest, 2.3 to 4.7 s by the seed: these have more seeds.
    """
    plain = tenants.Contest(
        shape="chat",
        load=tenants.LOAD,
        seconds=tenants.SECONDS,
        seed=1,
        engines=2 if quick else 4,
    )
    seeds = {"chat": 2, "tools": 3} if quick else {"chat": 3, "tools": 6}
    contests = [
        replace(plain, shape=shape, seed=1 + seed, **other)
        for shape, count in seeds.items()
        for seed in range(count)
        for other in (FLOODERS[:3] if quick else FLOODERS)
    ]
    contests += [
        replace(plain, seed=1 + seed, engines=1, flood=flood, jct_s=jct_s, light_ttft_s=1.0)
        for flood in (None, "long")
        for jct_s in (20.0, 60.0)
        for seed in range(3)
    ]
    if quick:
        return Row(contests, full_fleet.tenants_runner, tenant_report.light_claims)
    own = replace(plain, shape="long", flood="small", fair=False)
    return Row([*contests, own.base, own], full_fleet.tenants_runner, tenant_report.claims)


def _programs(*, quick: bool) -> Row:
    """Parrot's programs and mixes, against chaining by clients and other simple alternatives."""
    return Row(
        programs.tasks(quick=quick),
        sweep.Runner,
        lambda found: programs.claims(merged(found), quick=quick),
        TRACE_FILES,
        programs.part_of,
    )


def _prefixes(*, quick: bool) -> Row:
    """Preble's documents and tool lists, against round robin and E2."""
    plan = policy_runs.Plan(PLACEMENT_POLICIES, calls_an_engine=60 if quick else 150)
    tasks = [
        policy_runs.Task(workload, 4, seed)
        for workload in ("video", "loogle", "tools")
        for seed in ((100,) if quick else (100, 101, 102))
    ]
    return Row(tasks, partial(policy_runs.Runner, plan), placement_claims)


def _preble(*, quick: bool) -> Row:
    """Preble's workloads, against round robin, E2 and SMG's tree. A quick run has those that `prefixes` lacks."""
    chosen = ("programming", "embodied agents") if quick else (*WORKLOADS, preble.MIX)
    tasks = [
        preble.Task(workload, preble.MIX_MACHINE, seed)
        for workload in chosen
        for seed in preble.SEEDS[: 1 if quick else 3]
    ]
    made = preble.experiment(tasks, 60 if quick else preble.CALLS)
    return Row(tasks, made.new_runner, preble.rival_claims, made.files)


def _scheduler(*, quick: bool) -> Row:
    """AccelGen's mixed prompts on one engine, against FCFS."""
    return Row(scheduler.tasks(quick=quick), sweep_of_schedulers.Runner, scheduler.claims, mixed_prompts.TRACE_FILES)


def _comparison() -> Row:
    """README's table, against what is simple and what others ship."""
    return Row(
        [Experiment(calls=QUICK_CALLS, turns=TURNS)],
        lambda _traces: lambda asked: list(compared(asked, None).claims()),
        _joined,
    )


def _joined(found: Found) -> Iterator[Claim]:
    return iter([claim for claims in found.values() for claim in claims])


def _documents(*, quick: bool) -> Row:
    """Questions on a few long documents, against no admission and round robin."""
    plan = runs.Plan(systems=DEFAULT, fleet=FleetSize(), loads=(0.75, 0.95, 1.5))
    if quick:
        plan = replace(plan, calls=200, at_once_s=30.0, open_s=60.0, over_s=30.0)
    tasks = [("documents", seed) for seed in ((11,) if quick else (11, 12, 13))]
    return Row(tasks, full_fleet.NewRunner(plan), lambda found: document_claims(merged(found)))


def _agents(*, quick: bool) -> Row:
    """Agents whose contexts do not fit into the KV, against the same without holding their sessions."""
    chosen = {name: GROUPS["full"][name] for name in ((QUICK_AGENTS,) if quick else AGENTS)}
    tasks = [
        agent_sessions.Task(name, condition, seed, agent_sessions.OURS)
        for name, (condition, _) in chosen.items()
        for seed in ((1,) if quick else (1, 2, 3))
    ]
    wanted = {name: wanted for name, (_, wanted) in chosen.items()}
    return Row(
        tasks,
        agent_sessions.new_runner,
        lambda found: agent_sessions.claims([*found.values()], wanted),
        [AGENTS_FILE],
        part_of=lambda task: task.name[0].lower(),  # the fleet
    )


def _gateways(*, quick: bool) -> Row:
    """Four gateways that hear of each other, against one."""
    experiment = Experiment(
        calls=600 if quick else 3000,
        engines=8,
        working_set=4.0,
        report_interval_s=gateways.INTERVAL_S,
    )
    tasks = [gateways.Task(kind, seed) for kind in gateways.KINDS for seed in ((1,) if quick else (1, 2, 3))]
    new_runner = gateways.NewRunner(experiment, gateways.LOADS[:1] if quick else gateways.LOADS, FOUR_GATEWAYS)

    return Row(tasks, new_runner, lambda found: gateways.claims([one for some in found.values() for one in some]))


def _unnamed(*, quick: bool) -> Row:
    """Documents that come and go, of which no call names a session, through four gateways, against one."""
    asked = (("video", 10.2),) if quick else (("video", 5.7), ("video", 10.2), ("loogle", 2.2))
    tasks = [
        through_gateways.Task(workload, rate_per_s, 1200, seed)
        for workload, rate_per_s in asked
        for seed in ((1,) if quick else (1, 2, 3))
    ]
    return Row(tasks, through_gateways.new_runner, through_gateways.claims)


def _ranks(*, quick: bool) -> Row:
    """Placement by data-parallel rank, against servers that balance by themselves and SMG's tree."""
    plan = ranks.QUICK if quick else ranks.Plan(ranks.CALLS, ranks.cells())
    tasks = ranks.QUICK_TASKS if quick else ranks.tasks_of(ranks.SEEDS)
    return Row(tasks, plan, ranks.claims, part_of=attrgetter("workload"))


def _estimates(*, quick: bool) -> Row:
    """Engines whose caches are estimated wrongly, against a gateway that knows each hit beforehand."""
    plan = estimates.QUICK if quick else estimates.Plan(estimates.CALLS)
    tasks = estimates.QUICK_TASKS if quick else estimates.tasks_of(estimates.SEEDS)
    return Row(tasks, plan, estimates.claims, part_of=attrgetter("workload"))


def _windows(*, quick: bool) -> Row:
    """Engines with a sliding window that report where hits can end, against a gateway that asks them for each hit."""
    plan = windows.QUICK if quick else windows.Plan(windows.CALLS)
    tasks = windows.QUICK_TASKS if quick else windows.tasks_of(windows.SEEDS)
    return Row(tasks, plan, windows.claims)


QUICK_AGENTS: Final = "A 1.9, chat beside"
AGENTS: Final = ("A 1.9", "B 1.9", "B 0.95", QUICK_AGENTS)
FLOODERS: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {"flood": "small"},
    {"ttft_s": 0.5},
    {"objective": Objective.LATENCY},
)
"""How the heavy tenant's calls differ from those of the others. First: not at all."""
FOUR_GATEWAYS: Final[tuple[tuple[int, gateways.Way, float], ...]] = (
    (1, "blind", 0.0),
    (4, "told", gateways.DELAY_S),
)
"""One gateway that hears of nobody, and four that hear of each other late. Each is compared with one that is told."""
