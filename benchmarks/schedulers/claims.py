"""What the experiment is to show, as fixed targets against what it did show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from benchmarks.schedulers.sweep import BRIEF, Point, Results
from benchmarks.schedulers.systems import OURS, systems
from plait.lab.simulation.claim import Claim

FCFS: Final = ("fcfs_512", "fcfs_2048")
FEW_LOST: Final = "few_lost"
LEAST_OF_ORACLE: Final = 0.95
"""Of the goodput of the best schedule that knows every output's length."""
LEAST_THROUGHPUT: Final = 0.95
SATURATED_SHARE = 0.95
"""A system is beyond its knee where it completes less than this share of the offered rate."""


THROUGHPUT, GOODPUT, JCT = "throughput (calls/s)", "goodput", "mean JCT, times shorter"
ITERATIONS, CALLS = "SLO attainment per iteration, gain", "SLO attainment per call, gain"
PUBLISHED: Final[Mapping[str, tuple[float, float]]] = {
    THROUGHPUT: (1.42, 11.2),
    GOODPUT: (1.43, 13.7),
    ITERATIONS: (0.37, 0.90),
    CALLS: (0.37, 0.90),
    JCT: (1.6, 12.0),
}
"""AccelGen's, over the baseline that it gains least on and over the one that it gains most on (its section 6.2)."""

Figures = dict[str, float]
Ratio = Callable[[Sequence[tuple[Figures, Figures]]], float]
"""How many times better ours is, from (ours, theirs) at several loads."""


def knee(results: Results, tpot: str, system: str) -> float:
    """The lowest offered rate beyond which `system` does not keep up; the highest of the sweep if it always does."""
    points = sorted(_points(results, tpot, system), key=lambda point: point.rate_per_s)
    for point in points:
        figures = results[point]
        if figures["throughput_calls_s"] < SATURATED_SHARE * figures["calls"] / figures["window_s"]:
            return point.rate_per_s
    return points[-1].rate_per_s


def claims(results: Results) -> list[Claim]:
    """All of them, computed from the sweep over arrival rates."""
    made = list[Claim]()
    for name, ratio in RATIOS.items():
        made += _over_baselines(results, name, ratio, *PUBLISHED[name])
    oracle = [name for name, system in systems().items() if system.kind == "clairvoyant"]
    fcfs = [name for name, system in systems().items() if system.kind == "baseline" and name.startswith("fcfs")]
    made += [
        _worst(results, "throughput of the best clairvoyant schedule", "throughput_calls_s", oracle, 0.88),
        _worst(results, "goodput of the best clairvoyant schedule", "goodput_calls_s", oracle, LEAST_OF_ORACLE),
        _worst(results, "throughput of FCFS with chunked prefill, its best budget", "throughput_calls_s", fcfs, 0.99),
        _worst(results, "goodput of FCFS with chunked prefill, its best budget", "goodput_calls_s", fcfs, 0.99),
        *by_load(results),
    ]
    return made


def by_load(results: Results) -> Iterator[Claim]:
    """With short prompts and outputs: ours beside schedules that know each output's length, and FCFS, at each rate.

    `srpt` takes the shortest remaining call and no objectives, so a scheduler by objectives has to keep more of them.
    The best clairvoyant schedule drops what it cannot keep.
    """
    oracle = [name for name, system in systems().items() if system.kind == "clairvoyant"]
    for ours in (point for point in results if (point.figure, point.system) == (BRIEF, OURS)):
        for name, field, rivals, least in (
            ("goodput, {} / srpt", "goodput_calls_s", ["srpt"], 1.0),
            ("goodput, {} / the best clairvoyant schedule", "goodput_calls_s", oracle, LEAST_OF_ORACLE),
            ("completed calls/s, {} / the better FCFS", "throughput_calls_s", FCFS, LEAST_THROUGHPUT),
        ):
            there = [results[_of(ours, rival)][field] for rival in rivals if _of(ours, rival) in results]
            one_call = 1 / results[ours]["window_s"]
            value = results[ours][field] / max(one_call, *there)
            excused = _told_less(results, ours) if rivals is oracle else ""
            yield Claim(f"{name.format(OURS)}, {ours.rate_per_s:g}/s", value, least=least, excused=excused)


def _told_less(results: Results, ours: Point) -> str:
    """What the best clairvoyant schedule does with what it knows."""
    feasible, most = results[ours]["feasible_attainment"], results[_of(ours, FEW_LOST)]["feasible_attainment"]
    return (
        f"Measured: of the calls that an idle engine serves in time it keeps {feasible:.2f}, {FEW_LOST} {most:.2f}, "
        "which knows each output in advance and begins no call that it cannot keep."
    )


def _over_baselines(results: Results, name: str, ratio: Ratio, least: float, most: float) -> Iterator[Claim]:
    """Two claims: against the baseline that we gain least on, and against the one that we gain most on."""
    values = []
    for baseline in (system.name for system in systems().values() if system.kind == "baseline"):
        from_s = knee(results, "range", baseline)
        loads = [point for point in _points(results, "range", OURS) if point.rate_per_s >= from_s]
        values.append((ratio([(results[point], results[_of(point, baseline)]) for point in loads]), baseline))
    for word, target, (value, baseline) in (("least", least, min(values)), ("most", most, max(values))):
        yield Claim(f"{name}: {word} over the baselines beyond their knee", value, least=target, where=baseline)


def _worst(results: Results, name: str, field: str, rivals: Sequence[str], target: float) -> Claim:
    """Our share of the best rival's figure at the load where that share is least."""
    shares = []
    for point in (*_points(results, "range", OURS), *_points(results, "choice", OURS)):
        best = max(results[_of(point, rival)][field] for rival in rivals)
        if best > 0:
            shares.append((results[point][field] / best, f"{point.tpot} TPOT at {point.rate_per_s:g}/s"))
    value, where = min(shares, default=(1.0, ""))
    return Claim(f"share of the {name}, at the worst load", value, least=target, where=where)


def _times(field: str) -> Ratio:
    return lambda pairs: _sum(pairs, 0, field) / max(_sum(pairs, 1, field), 1e-9)


def _goodput_times(pairs: Sequence[tuple[Figures, Figures]]) -> float:
    """A baseline that met no call at all counts as having met one."""
    one_call = min(1 / theirs["window_s"] for _, theirs in pairs)
    return _sum(pairs, 0, "goodput_calls_s") / max(_sum(pairs, 1, "goodput_calls_s"), one_call)


def _iteration_gain(pairs: Sequence[tuple[Figures, Figures]]) -> float:
    return _times("iteration_attainment")(pairs) - 1


def _call_gain(pairs: Sequence[tuple[Figures, Figures]]) -> float:
    one_call = min(1 / theirs["calls"] for _, theirs in pairs)
    return _sum(pairs, 0, "call_attainment") / max(_sum(pairs, 1, "call_attainment"), one_call) - 1


def _jct_times(pairs: Sequence[tuple[Figures, Figures]]) -> float:
    return _sum(pairs, 1, "jct_mean_s") / _sum(pairs, 0, "jct_mean_s")


def _sum(pairs: Iterable[tuple[Figures, Figures]], side: int, field: str) -> float:
    return sum(pair[side][field] for pair in pairs)


def _points(results: Results, tpot: str, system: str) -> list[Point]:
    return [point for point in results if (point.figure, point.tpot, point.system) == ("rate", tpot, system)]


def _of(point: Point, system: str) -> Point:
    return Point(point.figure, point.tpot, point.long_share, point.rate_per_s, system)


RATIOS: Final[Mapping[str, Ratio]] = {
    THROUGHPUT: _times("throughput_calls_s"),
    GOODPUT: _goodput_times,
    ITERATIONS: _iteration_gain,
    CALLS: _call_gain,
    JCT: _jct_times,
}
