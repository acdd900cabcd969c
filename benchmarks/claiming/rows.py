"""The rows of the table: which runs of which experiment each takes, and what is claimed of them.

A row has no harness of its own. It takes the runner and the claims of an experiment that can be run by itself, with
smaller runs if it has to be quick. Each claim is of three seeds or more, and holds if the figure of all of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks import agent_sessions, estimates, full_fleet, gateways, mixed_prompts, own_order, preble, ranks, windows
from benchmarks.application import sweep
from benchmarks.application.experiments import TRACE_FILES
from benchmarks.claiming import programs, room, scheduler, through_gateways
from benchmarks.claiming.documents import document_claims
from benchmarks.claiming.placement import PLACEMENT_POLICIES, placement_claims
from benchmarks.filling import promise_report, promises, runs, tenant_report, tenants
from benchmarks.filling.systems import ADMISSION, DEFAULT, FCFS, NONE, FleetSize
from benchmarks.holding.closed_loop import Condition
from benchmarks.holding.conditions import GROUPS
from benchmarks.placing import held_cells, policy_runs
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

SEEDS: Final = 3
"""Of a claim, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is run: quick, or in full; with the seeds that are reported, or with those so many later."""

    quick: bool
    later: int = 0

    def seeds(self, first: int = 1, count: int = SEEDS) -> tuple[int, ...]:
        """So many, from the first on that is reported."""
        return tuple(range(first + self.later, first + self.later + count))


@dataclass(frozen=True, slots=True)
class Row:
    """One experiment: its tasks, what makes their runner from the folder of the traces, and its claims.

    It needs these `files` of that folder. A row of more than five minutes names the part that a task is of; each part
    has claims of its own.

    `seed_of` gives a task's seed.
    """

    tasks: Sequence[Any]
    new_runner: Callable[[Path], Callable[[Any], Any]]
    claims: Callable[[Found], Iterator[Claim]]
    files: Sequence[str] = ()
    part_of: Callable[[Any], str] | None = None
    seed_of: Callable[[Any], Hashable] = attrgetter("seed")

    def claims_by_seed(self, found: Found) -> Iterator[Claim]:
        """The claims of all seeds, each with the value that it has with each seed alone."""
        by_seed: dict[Hashable, dict[Any, Any]] = {}
        for task, result in found.items():
            by_seed.setdefault(self.seed_of(task), {})[task] = result
        alone = [{_key(claim): claim.value for claim in self.claims(those)} for those in by_seed.values()]
        for claim in self.claims(found):
            values = tuple(of_seed[_key(claim)] for of_seed in alone if _key(claim) in of_seed)
            yield claim if claim.by_seed else replace(claim, by_seed=values)

    def parts(self) -> dict[str, Row]:
        """Rows of fewer tasks, by name, which have all tasks together."""
        if self.part_of is None:
            return {}
        tasks: dict[str, list[Any]] = {}
        for task in self.tasks:
            tasks.setdefault(self.part_of(task), []).append(task)
        return {part: replace(self, tasks=those) for part, those in tasks.items()}


def _key(claim: Claim) -> tuple[str, str]:
    """What a claim is about. What its name has in brackets may differ from seed to seed, such as the worst load."""
    return claim.name.partition(" (")[0], claim.where


def with_parts(whole: Mapping[str, Row]) -> dict[str, Row]:
    """The rows and, as `row-part`, the parts of those that have some."""
    return {**whole, **{f"{name}-{part}": made for name, row in whole.items() for part, made in row.parts().items()}}


def rows(*, quick: bool, later: int = 0) -> dict[str, Row]:
    """All of them, by name. The one with the longest tasks is first, so that no process is left with one at the end.

    With seeds that are so much `later` than the ones that are reported.
    """
    size = Size(quick=quick, later=later)
    return {
        "agents": _agents(size),
        "promises": _promises(size),
        "tenants": _tenants(size),
        "order": Row(own_order.tasks_of(size.seeds(), quick=quick), own_order.runner, own_order.claims),
        "programs": _programs(size),
        "prefixes": _prefixes(size),
        "room": _room(size),
        "preble": _preble(size),
        "scheduler": _scheduler(size),
        "documents": _documents(size),
        "gateways": _gateways(size),
        "unnamed": _unnamed(size),
        "ranks": _ranks(size),
        "comparison": _comparison(size),
        "estimates": _estimates(size),
        "windows": _windows(size),
    }


def in_turn(names: Iterable[str], turn: int) -> list[str]:
    """Leave out the rows of other parts of `IN_TURN` than this turn's."""
    others = {name for those in IN_TURN for name in those}.difference(IN_TURN[turn % len(IN_TURN)])
    return [name for name in names if name not in others]


def _promises(size: Size) -> Row:
    """Short calls with a TTFT, TPOT or JCT, against engines' priorities without a line, and in full FCFS engines.

    A seed has 110 to 180 short calls, and .952 to 1.000 of their TTFTs are kept at saturation: a full run has six.
    """
    plan = promises.Plan(
        fleet=FleetSize(engines=1),
        systems=(NONE, ADMISSION) if size.quick else (NONE, ADMISSION, FCFS),
        loads=(1.0,) if size.quick else (0.5, 0.85, 1.0),
    )
    if size.quick:
        plan = replace(plan, seconds=QUICK_PROMISES_S)
    seeds = size.seeds(count=SEEDS if size.quick else 2 * SEEDS)
    tasks = [(name, callers, seed) for name in promises.PROMISES for callers in promises.CALLERS for seed in seeds]
    return Row(
        tasks,
        partial(promises.Runner, plan),
        lambda found: promise_report.claims(merged(found), excuses=not size.quick),
        seed_of=itemgetter(2),
    )


def _tenants(size: Size) -> Row:
    """A heavy tenant with small calls, a TTFT or an objective, against a plain one; and a flood of one's own calls.

    On one engine, the others' TTFTs beside a heavy tenant with JCTs.

    Calls a second and the longest wait move by a tenth from seed to seed: a quick run has the light tenants only. Of
    some 80 light calls with tool lists the p99 is nearly the slowest, 2.3 to 4.7 s by the seed: these have more seeds,
    and a quick run leaves out the flood of small calls beside them.
    """
    plain = tenants.Contest(
        shape="chat",
        load=tenants.LOAD,
        seconds=tenants.SECONDS,
        seed=1,
        engines=2 if size.quick else 4,
    )
    flooders = QUICK_FLOODERS if size.quick else dict.fromkeys(("chat", "tools"), FLOODERS)
    contests = [
        replace(plain, shape=shape, seed=seed, **other)
        for shape, others in flooders.items()
        for seed in size.seeds(count=2 * SEEDS if shape == "tools" and not size.quick else SEEDS)
        for other in others
    ]
    contests += [
        replace(plain, seed=seed, engines=1, flood=flood, jct_s=jct_s, light_ttft_s=1.0)
        for flood in (None, "long")
        for jct_s in (20.0, 60.0)
        for seed in size.seeds()
    ]
    if size.quick:
        return Row(contests, full_fleet.tenants_runner, tenant_report.light_claims)
    own = [replace(plain, shape="long", flood="small", fair=False, seed=seed) for seed in size.seeds()]
    contests += [contest for one in own for contest in (one.base, one)]
    return Row(contests, full_fleet.tenants_runner, tenant_report.claims)


def _programs(size: Size) -> Row:
    """Parrot's programs and mixes, against chaining by clients and other simple alternatives."""
    return Row(
        programs.tasks(size.seeds, quick=size.quick),
        sweep.Runner,
        lambda found: programs.claims(found, quick=size.quick),
        TRACE_FILES,
        programs.part_of,
        seed_of=itemgetter(2),
    )


def _prefixes(size: Size) -> Row:
    """Preble's documents and tool lists, against round robin and what others ship."""
    plan = policy_runs.Plan(PLACEMENT_POLICIES, calls_an_engine=100 if size.quick else 150)
    tasks = [
        policy_runs.Task(workload, 4, seed)
        for workload in (("tools",) if size.quick else ("video", "loogle", "tools"))
        for seed in size.seeds(100)
    ]
    return Row(tasks, partial(policy_runs.Runner, plan), placement_claims)


def _room(size: Size) -> Row:
    """Documents on engines with room for copies, against SMG's tree and LMetric."""
    cell = held_cells.SMALL_ROOM if size.quick else held_cells.ROOM
    return Row(room.tasks_of(cell, size.seeds(200)), held_cells.Runner, room.room_claims)


def _preble(size: Size) -> Row:
    """Preble's workloads, against round robin, E2 and SMG's tree. A quick run has those that `prefixes` lacks.

    They are the same runs at one load: with fewer calls, SMG's tree is behind on programs, and with these it is ahead.
    """
    chosen = ("programming", "embodied agents") if size.quick else (*WORKLOADS, preble.MIX)
    tasks = [preble.Task(workload, preble.MIX_MACHINE, seed) for workload in chosen for seed in size.seeds()]
    made = preble.experiment(tasks, preble.CALLS, QUICK_PREBLE_LOADS if size.quick else preble.LOADS)
    return Row(tasks, made.new_runner, preble.rival_claims, made.files)


def _scheduler(size: Size) -> Row:
    """AccelGen's mixed prompts on one engine, against FCFS."""
    return Row(
        scheduler.tasks(size.seeds(0), quick=size.quick),
        sweep_of_schedulers.Runner,
        scheduler.claims,
        mixed_prompts.TRACE_FILES,
        seed_of=lambda task: task[1].seed,
    )


def _comparison(size: Size) -> Row:
    """README's table, against what is simple and what others ship."""
    return Row(
        [Experiment(calls=QUICK_CALLS, turns=TURNS, seed=seed) for seed in size.seeds()],
        lambda _traces: lambda asked: list(compared(asked, None).claims()),
        _means,
    )


def _means(found: Found) -> Iterator[Claim]:
    """Of claims that each task has made, the same ones: their mean values."""
    for same in zip(*found.values(), strict=True):
        yield replace(same[0], value=fmean(claim.value for claim in same))


def _documents(size: Size) -> Row:
    """Questions on a few long documents, against no admission and round robin."""
    plan = runs.Plan(systems=DEFAULT, fleet=FleetSize(), loads=(0.75, 0.95, 1.5))
    if size.quick:
        plan = replace(plan, loads=(0.95, 1.5), calls=200, at_once_s=30.0, open_s=60.0, over_s=30.0)
    tasks = [("documents", seed) for seed in size.seeds(11)]
    return Row(
        tasks,
        full_fleet.NewRunner(plan),
        lambda found: document_claims(merged(found)),
        seed_of=itemgetter(1),
    )


def _agents(size: Size) -> Row:
    """Agents whose contexts do not fit into the KV, against the same without holding their sessions."""
    chosen = {name: GROUPS["full"][name] for name in ((QUICK_AGENTS,) if size.quick else AGENTS)}
    if size.quick:
        chosen = {name: (_half(condition), wanted) for name, (condition, wanted) in chosen.items()}
    tasks = [
        agent_sessions.Task(name, condition, seed, agent_sessions.OURS, with_cap=not size.quick)
        for name, (condition, _) in chosen.items()
        for seed in size.seeds()
    ]
    wanted = {name: wanted for name, (_, wanted) in chosen.items()}
    return Row(
        tasks,
        agent_sessions.new_runner,
        lambda found: agent_sessions.claims([*found.values()], wanted),
        [AGENTS_FILE],
        part_of=lambda task: task.name[0].lower(),  # the fleet
    )


def _half(condition: Condition) -> Condition:
    """Half the engines, the sessions and the chat.

    With no sessions after the first twelve, chat had .449 of its TTFT without holding, instead of .119 in full.
    """
    return replace(
        condition,
        engines=condition.engines // 2,
        sessions=condition.sessions // 2,
        at_a_time=condition.at_a_time // 2,
        chat=condition.chat and replace(condition.chat, per_s=condition.chat.per_s / 2),
    )


def _gateways(size: Size) -> Row:
    """Four gateways that hear of each other, against one."""
    experiment = Experiment(
        calls=600 if size.quick else 3000,
        engines=8,
        working_set=4.0,
        report_interval_s=gateways.INTERVAL_S,
    )
    kinds = gateways.KINDS[-1:] if size.quick else gateways.KINDS
    tasks = [gateways.Task(kind, seed) for kind in kinds for seed in size.seeds()]
    new_runner = gateways.NewRunner(experiment, gateways.LOADS[:1] if size.quick else gateways.LOADS, FOUR_GATEWAYS)

    return Row(tasks, new_runner, lambda found: gateways.claims([one for some in found.values() for one in some]))


def _unnamed(size: Size) -> Row:
    """Documents that come and go, of which no call names a session, through four gateways, against one."""
    asked = (("video", 10.2),) if size.quick else (("video", 5.7), ("video", 10.2), ("loogle", 2.2))
    tasks = [
        through_gateways.Task(workload, rate_per_s, 1200, seed)
        for workload, rate_per_s in asked
        for seed in size.seeds()
    ]
    return Row(tasks, through_gateways.new_runner, through_gateways.claims)


def _ranks(size: Size) -> Row:
    """Placement by data-parallel rank, against servers that balance by themselves and SMG's tree."""
    plan = ranks.QUICK if size.quick else ranks.Plan(ranks.CALLS, ranks.cells())
    tasks = [ranks.Task("tools", seed) for seed in size.seeds()] if size.quick else ranks.tasks_of(size.seeds())
    return Row(tasks, plan, ranks.claims, part_of=attrgetter("workload"))


def _estimates(size: Size) -> Row:
    """Engines whose caches are estimated wrongly, against a gateway that knows each hit beforehand."""
    plan = estimates.QUICK if size.quick else estimates.Plan(estimates.CALLS)
    tasks = estimates.tasks_of(size.seeds(count=SEEDS if size.quick else len(estimates.SEEDS)))
    return Row(tasks, plan, estimates.claims, part_of=attrgetter("workload"))


def _windows(size: Size) -> Row:
    """Engines with a sliding window that report where hits can end, against a gateway that asks them for each hit."""
    plan = windows.QUICK if size.quick else windows.Plan(windows.CALLS)
    tasks = windows.tasks_of(size.seeds(count=SEEDS if size.quick else len(windows.SEEDS)))
    return Row(tasks, plan, windows.claims)


IN_TURN: Final = (
    ("agents",),
    ("prefixes", "room", "gateways"),
    ("preble", "documents", "unnamed"),
    ("ranks", "comparison", "estimates", "windows"),
)
"""Rows that take three quarters of a quick run's time, in parts of some 3 CPU minutes: `.ci/run` takes one, in turn."""
QUICK_AGENTS: Final = "A 1.9, chat beside"
AGENTS: Final = ("A 1.9", "B 1.9", "B 0.95", QUICK_AGENTS)
FLOODERS: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {"flood": "small"},
    {"ttft_s": 0.5},
    {"objective": Objective.LATENCY},
)
"""How the heavy tenant's calls differ from those of the others. First: not at all."""
QUICK_FLOODERS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "chat": FLOODERS[:3],
    "tools": ({}, {"ttft_s": 0.5}),
}
QUICK_PROMISES_S: Final = 40.0
QUICK_PREBLE_LOADS: Final = (0.9,)
FOUR_GATEWAYS: Final[tuple[tuple[int, gateways.Way, float], ...]] = (
    (1, "blind", 0.0),
    (4, "told", gateways.DELAY_S),
)
"""One gateway that hears of nobody, and four that hear of each other late. Each is compared with one that is told."""
