"""One of four engines becomes three times slower in the middle of a run: `python -m benchmarks slow_engine`.

In virtual time, on hot prefixes at half of round robin's saturation. The router's cost profile stays that of a fast
engine. Compared with: fixed shares of the calls, of which the best for the slowed fleet is taken; round robin; the
engine with most of the prompt cached; E2; and the policy that ships, told the truth from the start.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.backends.profiles import load_profile
from plait.gateway.fleet.router import Router
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.compare import MODEL, Workload, arrival_times, prepare, saturation_rate
from plait.lab.simulation.compare import Experiment as Comparison
from plait.lab.simulation.simulate import CallRecord, SimulatedCall, Simulation
from plait.policy.costs.cost_model import CostModel
from plait.policy.costs.situation import Situation, cached_prefix, placed
from plait.policy.placement.policies import Policy
from plait.policy.types import Call, Placement, PlacementReason

SLOWER: Final = 3.0
SLOWED_S: Final = 60.0
WITHIN_S: Final = 60.0
RATE: Final = 0.5
SHARES: Final = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25)
"""Of the calls, for the engine that is slowed; the others share the rest."""
TIMES: Final = 1.3
OURS: Final = "plait"
TOLD: Final = "plait, told the truth"


@dataclass(frozen=True, slots=True)
class Row:
    """Mean E2E in seconds before the engine is slowed, within 60 s of it, and after that."""

    system: str
    before_s: float
    within_s: float
    after_s: float


def shares(share: float, seed: int) -> Policy:
    """Fixed shares: `share` of the calls goes to the first engine."""
    dice = random.Random(seed)

    def place(call: Call, situation: Situation) -> Placement:
        first, *others = situation.engines
        engine = first if dice.random() < share else dice.choice(others)
        return placed(call, engine, PlacementReason.EXPLORE, cached_prefix(call, situation, engine))

    return Policy("shares", "fixed shares", place)


def most_cached(call: Call, situation: Situation) -> Placement:
    """The engine with most of the prompt cached, whatever its load; ties in turn."""
    turn = situation.turn % len(situation.engines)
    engines = [*situation.engines[turn:], *situation.engines[:turn]]
    engine = max(engines, key=lambda one: cached_prefix(call, situation, one))
    return placed(call, engine, PlacementReason.EXPLOIT, cached_prefix(call, situation, engine))


def slowed(costs: CostModel) -> CostModel:
    """The same engine, `SLOWER` times as slow in all that it does."""
    return replace(costs, efficiency=costs.efficiency / SLOWER)


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, seeds=(1, 2, 3))
    made.add_argument("--calls", type=int, default=4000, help="default: %(default)s")
    arguments = made.parse_args()
    new_runner = partial(_new_runner, arguments.calls)
    return conduct("slow_engine", Experiment(arguments.seeds, new_runner, _report), arguments)


def _new_runner(calls: int, _traces: Path) -> Callable[[int], list[Row]]:
    return lambda seed: _rows(Comparison(calls=calls, seed=seed))


def _report(by_seed: Mapping[int, Sequence[Row]]) -> Report:
    found = [row for rows in by_seed.values() for row in rows]
    rows = [_mean([row for row in found if row.system == system]) for system in dict.fromkeys(r.system for r in found)]
    cells = ([row.system, *(f"{part_s:.2f}" for part_s in (row.before_s, row.within_s, row.after_s))] for row in rows)
    return Report(
        lines=list(table(["mean E2E, s", "before", "within 60 s", "after"], cells)),
        claims=claims(rows),
        results=[asdict(row) for row in found],
    )


def claims(rows: Sequence[Row]) -> list[Claim]:
    """After 60 s, ours is within `TIMES` of the best fixed shares."""
    by_system = {row.system: row for row in rows}
    split = min((row for row in rows if row.system.startswith("shares")), key=lambda row: row.after_s)
    times = by_system[OURS].after_s / split.after_s
    return [Claim("mean E2E after 60 s, plait / the best shares", times, most=TIMES, where=split.system)]


def _rows(experiment: Comparison) -> list[Row]:
    workload = prepare(experiment, _quiet)
    rate_per_s = RATE * saturation_rate(experiment, workload, _quiet)
    run = partial(_run, experiment, workload, rate_per_s)
    systems: dict[str, Callable[[], list[CallRecord]]] = {
        OURS: lambda: run(OURS),
        TOLD: lambda: run(OURS, is_told=True),
        **{f"shares, {share:g} to the slow one": partial(run, shares(share, experiment.seed)) for share in SHARES},
        "round robin": lambda: run("round_robin"),
        "most cached": lambda: run(Policy("most_cached", "most cached", most_cached)),
        "e2": lambda: run("e2"),
    }
    return [_row(name, make()) for name, make in systems.items()]


def _run(
    experiment: Comparison, workload: Workload, rate_per_s: float, policy: str | Policy, *, is_told: bool = False
) -> list[CallRecord]:
    costs = load_profile(experiment.profile).cost_model()
    router = Router(policy)
    engines = {}
    for number in range(experiment.engines):
        name = f"engine-{number}"
        known = slowed(costs) if is_told and number == 0 else costs
        router.add_engine(name, known, kv_tokens=workload.kv_tokens)
        settings = EngineSettings(
            name=name, model=MODEL, kv_tokens=workload.kv_tokens, block_tokens=experiment.block_tokens
        )
        engines[name] = Engine(settings, costs)
    simulation = Simulation(router, engines, MODEL)
    simulation.at(SLOWED_S, lambda _now_s: setattr(engines["engine-0"], "cost_model", slowed(costs)))
    arrivals = arrival_times(experiment, workload, rate_per_s)
    return simulation.run(
        [
            SimulatedCall(arrives_s, prompt, call.max_tokens, call.prefix)
            for arrives_s, prompt, call in zip(arrivals, workload.prompts, workload.calls, strict=True)
        ]
    )


def _row(system: str, records: Sequence[CallRecord]) -> Row:
    ends_s = (0.0, SLOWED_S, SLOWED_S + WITHIN_S, float("inf"))
    parts = [
        fmean(record.e2e_s for record in records if begins_s <= record.arrived_s < end_s)
        for begins_s, end_s in itertools.pairwise(ends_s)
    ]
    return Row(system, *parts)


def _mean(rows: Sequence[Row]) -> Row:
    first = rows[0]
    return Row(
        first.system, *(fmean(getattr(row, part) for row in rows) for part in ("before_s", "within_s", "after_s"))
    )


def _quiet(_label: str, _done: int, _total: int) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
