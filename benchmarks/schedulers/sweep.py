"""The runs of the experiment: which system serves which workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.mixed_prompts import LONG_SHARE, PROFILE, PUBLISHED_PER_S, Mix, MixedPrompts
from benchmarks.schedulers.engine_run import BLOCK_TOKENS, run
from benchmarks.schedulers.metrics import goodput_bound, measure
from benchmarks.schedulers.systems import Machine, systems
from plait.backends.profiles import load_profile

BRIEF = "brief"
"""The figure with AccelGen's short prompts and outputs."""
BOUND = "bound"
"""The name under which the relaxation bound is among the results; only its goodput means anything."""


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a figure: a system under a load. `rate_per_s` is the offered rate."""

    figure: str
    tpot: str
    long_share: float
    rate_per_s: float
    system: str


Task = tuple[Point, Mix]
"""A point under a workload."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is swept: `calls` in each run, one run for each seed and point; the sensitivity figures take one seed."""

    calls: int
    seeds: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    """Offered rates by kind of TPOT objective."""
    kinds: tuple[str, ...] = ("baseline", "ours", "ablation", "clairvoyant", BOUND)
    """The kinds of systems that run at every rate."""
    variant_rates: tuple[float, ...] = ()
    """At these of the rates, all systems run."""
    shares: tuple[float, ...] = ()
    share_rate: float = 0.3
    alone: dict[float, tuple[float, ...]] | None = None
    """Offered rates by share of long prompts, 0 and 1: each trace's lengths alone."""
    brief: tuple[float, ...] = ()
    """Offered rates of `Mix.brief`, up to the paper's."""

    def named(self, names: Sequence[str]) -> list[Point]:
        """These systems at each rate of the main figure."""
        return [
            Point("rate", tpot, LONG_SHARE, rate, name)
            for tpot, rates in self.rates.items()
            for rate in rates
            for name in names
        ]

    def points(self, few: Sequence[str]) -> list[Point]:
        """Every point: the systems of each rate in the main figure, `few` in the sensitivity figures."""
        kinds = {name: system.kind for name, system in systems().items() if system.kind != "registered"} | {
            BOUND: BOUND
        }
        points = [
            Point("rate", tpot, LONG_SHARE, rate, name)
            for tpot, rates in self.rates.items()
            for rate in rates
            for name, kind in kinds.items()
            if kind in self.kinds or rate in self.variant_rates
        ]
        points += [Point("share", "range", share, self.share_rate, name) for share in self.shares for name in few]
        points += [
            Point("alone", "range", share, rate, name)
            for share, rates in (self.alone or {}).items()
            for rate in rates
            for name in few
        ]
        clairvoyant = [name for name, kind in kinds.items() if kind == "clairvoyant"]
        points += [
            Point(BRIEF, "range", LONG_SHARE, rate, name)
            for rate in self.brief
            for name in dict.fromkeys((*few, *clairvoyant))
        ]
        return points

    def tasks(self, points: Sequence[Point]) -> list[Task]:
        """Every point with each of its seeds."""
        return [(point, mix_of(point, self.calls, seed)) for point in points for seed in self.seeds_of(point)]

    def seeds_of(self, point: Point) -> tuple[int, ...]:
        """The seeds with which a point is run."""
        return self.seeds if point.figure in {"rate", BRIEF} else self.seeds[:1]


def mix_of(point: Point, calls: int, seed: int) -> Mix:
    """The calls that a point's system serves."""
    return Mix(calls, point.rate_per_s, seed, point.long_share, point.tpot, brief=point.figure == BRIEF)


QUICK = Plan(calls=300, seeds=(0, 1, 2), rates={"range": (0.6,)}, kinds=("baseline", "ours", "clairvoyant", BOUND))
"""With one seed of 120 calls, goodput moves by 13 % with the seed."""
FULL = Plan(
    calls=300,
    seeds=(0, 1, 2),
    rates={"range": (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0), "choice": (0.1, 0.3, 0.6)},
    variant_rates=(0.1, 0.3, 0.6),
    shares=(0.0, 0.2, 0.5, 0.8, 1.0),
    alone={0.0: (0.5, 1.0, 2.0, 4.0), 1.0: (0.05, 0.1, 0.2, 0.4)},
    brief=(0.5, 1.0, 2.0, PUBLISHED_PER_S),
)


def machine(profile_name: str = PROFILE) -> Machine:
    """The engine that every system runs on: the profile's, its KV cache cut to whole blocks."""
    profile = load_profile(profile_name)
    return Machine(profile.cost_model(), profile.kv.tokens // BLOCK_TOKENS * BLOCK_TOKENS)


class Runner:
    """Runs points on one machine; the traces are read once."""

    def __init__(self, traces: Path) -> None:
        self.machine = machine()
        self.prompts = MixedPrompts(traces, self.machine.cost_model, self.machine.kv_tokens)

    def __call__(self, task: Task) -> dict[str, float]:
        """One run's figures."""
        point, mix = task
        calls = self.prompts.draw(mix)
        if point.system == BOUND:
            return {"goodput_calls_s": goodput_bound(calls, self.machine.cost_model, self.machine.kv_tokens)}
        system = systems()[point.system]
        finished = run(
            system.build(self.machine),
            calls,
            self.machine.cost_model,
            kv_tokens=self.machine.kv_tokens,
            max_batch_tokens=system.max_batch_tokens(self.machine),
        )
        return asdict(measure(finished))


Results = dict[Point, dict[str, float]]
"""Each point's figures, means over the seeds; fields as in `Metrics`."""


def means(found: Mapping[Task, Mapping[str, float]]) -> Results:
    """The mean figures of each point over its seeds."""
    gathered: dict[Point, list[Mapping[str, float]]] = {}
    for (point, _), metrics in found.items():
        gathered.setdefault(point, []).append(metrics)
    return {point: _mean_of(runs) for point, runs in gathered.items()}


def _mean_of(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {field: fmean(metrics[field] for metrics in runs) for field in runs[0]}
