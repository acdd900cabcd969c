"""What the experiments are to show, as fixed targets against what they did show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.application.experiments import CHAINERS, EXPERIMENTS, Case
from benchmarks.application.figures import Figures
from benchmarks.application.sweep import Point, Results
from benchmarks.application.systems import LATENCY, OURS, THROUGHPUT
from plait.lab.simulation.claim import Claim

BASELINES = (LATENCY, THROUGHPUT)
WITHIN = 1.03
"""What ours may be behind the best of the simple alternatives."""


@dataclass(frozen=True, slots=True)
class Maximum:
    """The most that ours is better over a sweep, than a baseline, or at each point than the better of several."""

    name: str
    experiment: str
    kind: str
    baselines: tuple[str, ...]
    target: float


MAXIMA = (
    Maximum("chain summary, times faster than the better client-side chaining", "chain", "chain", BASELINES, 1.38),
    Maximum(
        "chain summary beside background calls, times faster than the better baseline",
        "background",
        "chain",
        BASELINES,
        2.38,
    ),
    Maximum(
        "chain summary beside background calls, times faster than latency-oriented",
        "background",
        "chain",
        (LATENCY,),
        2.38,
    ),
    Maximum(
        "chain summary beside Parrot's background calls, times faster than latency-oriented",
        "background_parrot",
        "chain",
        (LATENCY,),
        2.38,
    ),
    Maximum("chain summaries at once, times faster than the better baseline", "chains", "chain", BASELINES, 1.68),
    Maximum("chain summaries at once, times faster than latency-oriented", "chains", "chain", (LATENCY,), 1.68),
    Maximum("map-reduce summary, times faster than latency-oriented", "map_reduce", "map_reduce", (LATENCY,), 2.37),
    Maximum("multi-agent, times faster than latency-oriented", "multi_agent", "multi_agent", (LATENCY,), 11.7),
    Maximum("multi-agent, times faster than throughput-oriented", "multi_agent", "multi_agent", (THROUGHPUT,), 2.45),
    Maximum(
        "multi-agent, times faster than latency-oriented without prefix caching",
        "multi_agent",
        "multi_agent",
        ("latency_uncached",),
        11.7,
    ),
    Maximum(
        "multi-agent, times faster than throughput-oriented without prefix caching",
        "multi_agent",
        "multi_agent",
        ("throughput_uncached",),
        2.45,
    ),
    Maximum("chat beside map-reduce, times better than latency-oriented", "chat_mix", "chat", (LATENCY,), 5.5),
    Maximum("chat beside map-reduce, times better than throughput-oriented", "chat_mix", "chat", (THROUGHPUT,), 1.23),
    Maximum("map-reduce beside chat, times faster than latency-oriented", "chat_mix", "map_reduce", (LATENCY,), 3.7),
    Maximum(
        "map-reduce beside chat, times faster than throughput-oriented", "chat_mix", "map_reduce", (THROUGHPUT,), 1.05
    ),
    Maximum("assistants, times the sustained rate without affinity", "assistants", "assistant", (THROUGHPUT,), 3.0),
    Maximum(
        "assistants, times the sustained rate without affinity and prefix caching",
        "assistants",
        "assistant",
        ("throughput_uncached",),
        12.0,
    ),
    Maximum(
        "Parrot's assistants, times the sustained rate without affinity",
        "assistants_parrot",
        "assistant",
        (THROUGHPUT,),
        4.0,
    ),
    Maximum(
        "Parrot's assistants, times the sustained rate without affinity and prefix caching",
        "assistants_parrot",
        "assistant",
        ("throughput_uncached",),
        12.0,
    ),
)
"""The figures of Parrot's section 8, each the most over its sweep."""


def claims(results: Results) -> list[Claim]:
    """All of them that the results have points for."""
    return [*_maxima(results), *_none_slower(results), *_never_worse(results), *_beside_chainers(results)]


def speedup(results: Results, ours: Point, baseline: str) -> float:
    """How many times better ours is at a point: in latency, latency an output token, or sustained rate."""
    theirs = results[Point(ours.case, baseline, ours.kind)]
    own = results[ours]
    if own.sustained_per_s is not None and theirs.sustained_per_s is not None:
        return own.sustained_per_s / theirs.sustained_per_s
    normalised = ours.kind in EXPERIMENTS[ours.case.experiment].normalised
    return _cost(theirs, normalised=normalised) / _cost(own, normalised=normalised)


def our_points(results: Results, experiment: str, kind: str) -> list[Point]:
    """Ours, over the sweep."""
    return [
        point
        for point in results
        if point.system == OURS and point.case.experiment == experiment and point.kind == kind
    ]


def _cost(figures: Figures, *, normalised: bool) -> float:
    return figures.normalised_s if normalised else figures.latency_s


def _maxima(results: Results) -> Iterator[Claim]:
    for maximum in MAXIMA:
        points = our_points(results, maximum.experiment, maximum.kind)
        values = [
            (min(speedup(results, point, name) for name in maximum.baselines), _where(point.case)) for point in points
        ]
        if values:
            value, where = max(values)
            yield Claim(maximum.name, value, least=maximum.target, where=where)


def _none_slower(results: Results) -> Iterator[Claim]:
    """Of many chains at once, how much faster the one is that gains the least, against each baseline."""
    points = our_points(results, "chains", "chain")
    values = [
        (min(t / o for o, t in zip(results[point].latencies_s, _theirs(results, point, name), strict=True)), name)
        for point in points
        for name in BASELINES
    ]
    if values:
        value, where = min(values)
        yield Claim("chains: times faster, the chain that gains least", value, least=1.0, where=where)


def _theirs(results: Results, point: Point, system: str) -> Sequence[float]:
    return results[Point(point.case, system, point.kind)].latencies_s


def _never_worse(results: Results) -> Iterator[Claim]:
    """In each experiment, at the point where ours is least ahead of the better baseline."""
    for name, experiment in EXPERIMENTS.items():
        against = [system for system in BASELINES if system in experiment.systems]
        values = [
            (min(speedup(results, point, system) for system in against), f"{_where(point.case)}, {kind}")
            for kind in experiment.kinds
            for point in our_points(results, name, kind)
        ]
        if values:
            value, where = min(values)
            yield Claim(f"{name}: times the better baseline, at the worst point", value, least=1.0, where=where)


def _beside_chainers(results: Results) -> Iterator[Claim]:
    """Mean and p90 of the programs and of their neighbours, against the best of the simple alternatives."""
    for name, experiment in EXPERIMENTS.items():
        if not set(experiment.systems) & set(CHAINERS):
            continue
        for kind in experiment.kinds:
            points = our_points(results, name, kind)
            for figure, read in _FIGURES.items():
                values = [(_behind(results, point, read), _where(point.case)) for point in points]
                if values:
                    value, where = min(values)
                    claim = f"{name}: {figure} of {kind}, the best simple alternative / ours"
                    yield Claim(claim, value, least=1 / WITHIN, where=where)


def _behind(results: Results, ours: Point, read: Callable[[Figures], float]) -> float:
    """The best of the simple alternatives over ours."""
    others = (results[Point(ours.case, other, ours.kind)] for other in (*CHAINERS, "plait_fcfs"))
    return min(map(read, others)) / read(results[ours])


_FIGURES: dict[str, Callable[[Figures], float]] = {
    "mean latency": lambda figures: figures.latency_s,
    "p90 latency": lambda figures: figures.latency_p90_s,
}


def _where(case: Case) -> str:
    return f"{case.parameter} {case.value:g}"
