"""Whether a tenant's own calls keep their order: `python -m benchmarks own_order [--quick]`.

In virtual time, on two engines: chats beside 40 long prompts of the same tenant, without labels, with objectives, and
with priorities; each alone and beside another tenant's single call. Without admission, and on engines that serve calls
in the order of arrival, the same. Then a flood of small calls at 1.3 times the saturation beside a few long prompts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

from benchmarks.filling.systems import ADMISSION, FCFS, FCFS_ADMISSION, NONE, FleetSize, systems
from benchmarks.filling.workloads import EMPTY, FIRST_UNIQUE_ID, extended
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.compare import percentile
from plait.lab.simulation.simulate import SimulatedCall
from plait.lab.simulation.workload import poisson_arrivals
from plait.policy.types import Objective

Labels = Literal["plain", "objectives", "priorities"]

FLEET: Final = FleetSize(engines=2)
SYSTEMS: Final = (ADMISSION, NONE, FCFS_ADMISSION, FCFS)
LABELS: Final[Sequence[Labels]] = ("plain", "objectives", "priorities")
SEEDS: Final = (1, 2, 3)
LONG_TOKENS: Final = 5_500
LONG_ANSWER: Final = 120
LONG_CALLS: Final = 40
CHATS: Final = 20
BEGINS_S, EVERY_S = 1.0, 0.5
"""The first chat, and the time between two."""
FLOOD_LOAD: Final = 1.3
FLOOD_S: Final = 90.0
LONG_RATE: Final = 0.15
"""Long prompts a second beside a flood of small calls."""

PLAIN_MOST_S: Final = 2.0
LABELLED: Final = 1.2
"""The most that the TTFT of chats with the objective `latency` is, over that of chats with a priority."""
BESIDE: Final = 1.15
FLOODED_LONG, FLOODED_SMALL = 1.2, 1.1
"""The mean TTFT of long prompts, and the p90 of small ones, over those without admission."""


@dataclass(frozen=True, slots=True)
class Task:
    """A run. `labels` None: the flood of small calls."""

    system: str
    seed: int
    labels: Labels | None = None
    beside: bool = False
    """Another tenant has sent one call."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Times to the first token, in seconds."""

    small_mean_s: float
    small_p90_s: float
    long_mean_s: float
    other_s: float | None


def run(task: Task) -> Figures:
    """One run in virtual time."""
    _, simulation = systems(FLEET)[task.system](task.seed)
    records = simulation.run(burst(task) if task.labels else flood(task.seed))
    small, long, other = ([one.ttft_s for one in records if one.prefix == kind] for kind in ("small", "long", "other"))
    return Figures(fmean(small), percentile(small, 0.9), fmean(long), other[0] if other else None)


def burst(task: Task) -> list[SimulatedCall]:
    """The long prompts at once, then chats one after the other."""
    dice, labels = random.Random(f"chats {task.seed}"), task.labels
    has_objectives, priority = labels == "objectives", -1 if labels == "priorities" else 0
    last = {"objective": Objective.THROUGHPUT if has_objectives else None}
    first: dict[str, Any] = {"objective": Objective.LATENCY if has_objectives else None, "priority": priority}
    calls = [_call(0.0, "long", number, LONG_TOKENS, LONG_ANSWER, **last) for number in range(LONG_CALLS)]
    if task.beside:
        calls.append(replace(_call(0.05, "other", LONG_CALLS, 300, 30), tenant="other"))
    for number in range(CHATS):
        at_s, sizes = BEGINS_S + EVERY_S * number, (dice.randint(150, 400), dice.randint(30, 60))
        calls.append(_call(at_s, "small", LONG_CALLS + 1 + number, *sizes, **first))
    return calls


def flood(seed: int, load: float = FLOOD_LOAD) -> list[SimulatedCall]:
    """Small calls at a rate that the engines do not keep up with, and long prompts."""
    dice, rate_per_s = random.Random(f"flood {seed}"), load * _saturation_per_s()
    count = round(rate_per_s * FLOOD_S)
    arrivals_s = poisson_arrivals(count, rate_per_s, seed)
    calls = [_call(at_s, "small", number, *_small(dice)) for number, at_s in enumerate(arrivals_s)]
    more_s = poisson_arrivals(round(LONG_RATE * FLOOD_S), LONG_RATE, seed)
    calls += [_call(at_s, "long", count + number, LONG_TOKENS, LONG_ANSWER) for number, at_s in enumerate(more_s)]
    return sorted(calls, key=lambda call: call.arrives_s)


@cache
def _saturation_per_s() -> float:
    """The small calls a second that are completed if all come at once."""
    dice = random.Random("saturation")
    calls = [_call(0.0, "small", number, *_small(dice)) for number in range(400)]
    _, simulation = systems(FLEET)[NONE](0)
    return len(calls) / max(record.finished_s for record in simulation.run(calls))


def _small(dice: random.Random) -> tuple[int, int]:
    return dice.randint(200, 600), dice.randint(50, 150)


def _call(at_s: float, kind: str, number: int, tokens: int, answer_tokens: int, **fields: Any) -> SimulatedCall:
    prompt = extended(EMPTY, FIRST_UNIQUE_ID + number, tokens)
    return SimulatedCall(at_s, prompt, answer_tokens, prefix=kind, tenant="own", **fields)


def tasks_of(seeds: Sequence[int], *, quick: bool) -> list[Task]:
    """Quick: what is claimed alone."""
    chosen = (ADMISSION,) if quick else SYSTEMS
    bursts = [
        Task(system, seed, labels, beside)
        for system in chosen
        for seed in seeds
        for labels in LABELS
        for beside in (False, True)
    ]
    return [*bursts, *(Task(system, seed) for system in (ADMISSION, NONE) for seed in seeds)]


def claims(found: Mapping[Task, Figures]) -> Iterator[Claim]:
    """What is wanted with admission, in the mean over the seeds."""

    def mean(field: str, system: str = ADMISSION, labels: Labels | None = None, *, beside: bool = False) -> float:
        asked = Task(system, 0, labels, beside)
        return fmean(getattr(figures, field) for task, figures in found.items() if replace(task, seed=0) == asked)

    plain = mean("small_mean_s", labels="plain")
    yield Claim("chats' mean TTFT beside their tenant's long prompts, s", plain, most=PLAIN_MOST_S)
    beside = mean("small_mean_s", labels="plain", beside=True)
    yield Claim("the same beside another tenant's single call / alone", beside / plain, most=BESIDE)
    for other in (False, True):
        where = ", beside another tenant's call" if other else ""
        labelled = mean("small_mean_s", labels="objectives", beside=other)
        ratio = labelled / mean("small_mean_s", labels="priorities", beside=other)
        yield Claim(f"chats' mean TTFT, objectives / priorities{where}", ratio, most=LABELLED)
        ratio = labelled / mean("small_mean_s", labels="plain", beside=other)
        yield Claim(f"chats' mean TTFT, objectives / no labels{where}", ratio, most=1.0)
    long = mean("long_mean_s") / mean("long_mean_s", NONE)
    yield Claim(f"long prompts' mean TTFT beside a flood, {ADMISSION} / {NONE}", long, most=FLOODED_LONG)
    small = mean("small_p90_s") / mean("small_p90_s", NONE)
    yield Claim(f"the flood's p90 TTFT, {ADMISSION} / {NONE}", small, most=FLOODED_SMALL)


def runner(_traces: Path) -> Callable[[Task], Figures]:
    """Runs tasks."""
    return run


def report(found: Mapping[Task, Figures]) -> Report:
    """All figures, and the claims."""
    rows = [
        (task.system, str(task.labels), "yes" if task.beside else "no", str(task.seed), *_shown(figures))
        for task, figures in found.items()
    ]
    head = ("system", "labels", "another tenant", "seed", "small mean TTFT, s", "p90", "long mean TTFT, s")
    return Report(
        lines=list(table(head, rows)),
        claims=list(claims(found)),
        results=[{**asdict(task), **asdict(figures)} for task, figures in found.items()],
    )


def _shown(figures: Figures) -> tuple[str, str, str]:
    return f"{figures.small_mean_s:.2f}", f"{figures.small_p90_s:.2f}", f"{figures.long_mean_s:.2f}"


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    arguments = parser(__doc__, quick="what is claimed alone").parse_args()
    return conduct("own_order", Experiment(tasks_of(SEEDS, quick=arguments.quick), runner, report), arguments)


if __name__ == "__main__":
    sys.exit(main())
