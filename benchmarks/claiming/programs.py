"""What is claimed of programs that the gateway runs, against the strongest simple alternative in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.application.claims import BASELINES, WITHIN, speedup
from benchmarks.application.experiments import CHAINERS, EXPERIMENTS, Case
from benchmarks.application.sweep import Point, Results, Task
from benchmarks.application.systems import LATENCY, OURS, THROUGHPUT
from benchmarks.filling.claims import geometric_mean
from plait.lab.simulation.claim import Claim

SIMPLE: Final = ("plait_fcfs", *CHAINERS)
QUICK_SEEDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Faster:
    """Programs are wanted to be `least` times as fast as with each of `others`, at each value of a parameter.

    The geometric mean over the seeds counts and, where an experiment has several `kinds` of jobs, over the kinds. A
    quick run has only the last of the `values`.
    """

    experiment: str
    parameter: str
    values: tuple[float, ...]
    kinds: tuple[str, ...]
    least: float
    others: tuple[str, ...] = BASELINES

    def cases(self, *, quick: bool) -> list[Case]:
        """The points."""
        values = self.values[-1:] if quick else self.values
        return [Case(self.experiment, self.parameter, value) for value in values]


CHUNKS: Final = (512, 1_024, 1_536, 2_048)
MIX: Final = Faster(
    experiment="latency_mix",
    parameter="shared_tokens",
    values=(200, 2_000, 6_000),
    kinds=("map_reduce", "chat"),
    least=1 / WITHIN,
    others=SIMPLE,
)
BUSY_MIX: Final = replace(MIX, experiment="busy_mix")
CHAT_MIX: Final = Faster(
    experiment="chat_mix",
    parameter="map_reduce_rate",
    values=(0.8,),
    kinds=("chat",),
    least=1.23,
    others=(THROUGHPUT,),
)
WANTED: Final = (
    # 1.40 on an engine that plans nothing ahead. A call that begins as another one ends waits for the iteration in
    # which that one has its place; clients that chain calls arrive later.
    Faster(experiment="chain", parameter="output_tokens", values=(25,), kinds=("chain",), least=1.35),
    Faster(experiment="background", parameter="background_rate", values=(3.5,), kinds=("chain",), least=1.10),
    Faster(experiment="chains", parameter="applications", values=(25,), kinds=("chain",), least=1.10),
    Faster(experiment="map_reduce", parameter="chunk_tokens", values=CHUNKS, kinds=("map_reduce",), least=1.0),
    Faster(
        experiment="map_reduce",
        parameter="chunk_tokens",
        values=CHUNKS[-1:],
        kinds=("map_reduce",),
        least=2.37,
        others=(LATENCY,),
    ),
    Faster(experiment="multi_agent", parameter="files", values=(4, 8, 12, 16), kinds=("multi_agent",), least=1.0),
    CHAT_MIX,
    replace(CHAT_MIX, kinds=("map_reduce",), least=1.05),
    MIX,
    BUSY_MIX,
)
"""What docs/applications.md says of the means. Factors above 1.1 are Parrot's own (its section 8)."""


def tasks(seeds: Callable[[int, int], tuple[int, ...]], *, quick: bool) -> list[Task]:
    """The runs that the claims need, each with one of the `seeds`, which are given from a first one on and counted."""
    return list(
        dict.fromkeys(
            (case, system, (seed,))
            for wanted in WANTED
            for case in wanted.cases(quick=quick)
            for system in (OURS, *wanted.others)
            for seed in seeds(0, QUICK_SEEDS if quick else max(QUICK_SEEDS, EXPERIMENTS[wanted.experiment].seeds))
        )
    )


def part_of(task: Task) -> str:
    """Most runs are those beside much chat, whose times scatter: each of its points is a part."""
    case = task[0]
    return f"busy-{case.value:g}" if case.experiment == BUSY_MIX.experiment else "others"


def claims(found: Mapping[Task, Results], *, quick: bool) -> Iterator[Claim]:
    """The claims of what was run, each with the point and the other system where it holds least."""
    by_case: dict[Case, dict[tuple[int, ...], Results]] = {}
    for (case, _, seeds), results in found.items():
        by_case.setdefault(case, {}).setdefault(seeds, {}).update(results)
    for wanted in WANTED:
        by_seed = {
            (case, other): [
                geometric_mean([speedup(of_seed, Point(case, OURS, kind), other) for kind in wanted.kinds])
                for of_seed in by_case[case].values()
            ]
            for case in wanted.cases(quick=quick)
            if case in by_case
            for other in wanted.others
        }
        if not by_seed:
            continue
        values = {where: geometric_mean(ratios) for where, ratios in by_seed.items()}
        case, other = worst = min(values, key=values.__getitem__)
        name = f"{case.experiment} ({case.parameter} {case.value:g}): {' and '.join(wanted.kinds)}, {other} / {OURS}"
        yield Claim(name, values[worst], least=wanted.least, by_seed=tuple(by_seed[worst]))
