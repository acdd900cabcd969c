"""Metrics, the goodput bound and the claims, worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.mixed_prompts import Lengths, MixedCall
from benchmarks.schedulers.claims import FEW_LOST, by_load, claims, knee
from benchmarks.schedulers.engine_run import CallRecord, Iterations, Run, run
from benchmarks.schedulers.metrics import goodput_bound, measure, most_items
from benchmarks.schedulers.sweep import BOUND, BRIEF, FULL, QUICK, Point, Results
from benchmarks.schedulers.systems import OURS, systems
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.scheduling.in_order import Fcfs
from plait.policy.types import Slo

COSTS = CostModel(PiecewiseLinear(((1, 0.01),), 0.0001), 0.0, 0.0, 0.0, LongAttention())


def a_call(number: int, arrives_s: float, *, feasible: bool = True, output_tokens: int = 3) -> MixedCall:
    slo = Slo(ttft_s=1.0, tpot_s=0.5)
    return MixedCall(number, arrives_s, Lengths(1_000, output_tokens), False, slo, feasible)


def record_of(call: MixedCall, *token_times_s: float) -> CallRecord:
    record = CallRecord(call)
    for at_s in token_times_s:
        record.token(at_s)
    record.finished_s = token_times_s[-1]
    return record


def test_a_call_meets_its_objectives_on_average_and_its_iterations_one_by_one() -> None:
    record = record_of(a_call(0, 10.0), 11.0, 11.7, 12.0)
    assert record.ttft_s == pytest.approx(1.0)
    assert record.tpot_s == pytest.approx(0.5)
    assert record.met
    assert record.iterations_met == 2  # the gap of 0.7 s is over 0.5 s
    assert record.jct_met


def test_a_late_first_token_can_be_made_up_for_in_jct_only() -> None:
    record = record_of(a_call(0, 10.0), 11.5, 11.6, 11.7)
    assert not record.met
    assert record.iterations_met == 2
    assert record.jct_met


def test_the_window_leaves_out_the_warm_up_and_the_draining() -> None:
    calls = [a_call(0, 0.5), a_call(1, 4.0), a_call(2, 6.0, feasible=False), a_call(3, 10.0)]
    records = [
        record_of(calls[0], 0.8, 1.2, 1.5),  # arrives in the warm-up, ends in the window
        record_of(calls[1], 4.5, 4.6, 4.7),
        record_of(calls[2], 8.0, 8.1, 8.2),  # first token late
        record_of(calls[3], 10.5, 10.6, 10.7),  # ends after the window
    ]
    times = [0.8, 1.2, 1.5, 4.5, 4.6, 4.7, 8.0, 8.1, 8.2, 10.5, 10.6, 10.7]
    sums = Iterations(
        count=4, busy_s=2.0, forward_tokens=40, full_forwards=1.0, kv_share_s=0.5, decisions_ns=[1_000_000]
    )
    metrics = measure(Run(records, sums, times))
    assert metrics.calls == 3
    assert metrics.throughput_calls_s == pytest.approx(3 / 9)
    assert metrics.throughput_tokens_s == pytest.approx(8 / 9)
    assert metrics.goodput_calls_s == pytest.approx(2 / 9)
    assert metrics.call_attainment == pytest.approx(2 / 3)
    assert metrics.feasible_attainment == 1.0
    assert metrics.iteration_attainment == pytest.approx(8 / 9)
    assert metrics.jct_mean_s == pytest.approx((0.7 + 2.2 + 0.7) / 3)
    assert metrics.jct_attainment == pytest.approx(2 / 3)
    assert metrics.compute_utilisation == 0.25
    assert metrics.kv_utilisation == 0.25
    assert metrics.decision_median_ms == 1.0


def test_a_lone_call_takes_what_the_cost_model_says() -> None:
    call = MixedCall(0, 2.0, Lengths(1_001, 3), False, Slo(ttft_s=1.0, tpot_s=0.5), feasible=True)
    finished = run(Fcfs(), [call], COSTS, kv_tokens=3_200, max_batch_tokens=2_048, ahead=0)
    assert finished.records[0].ttft_s == pytest.approx(0.11)
    assert finished.records[0].jct_s == pytest.approx(0.11 + 2 * 0.01)
    assert finished.iterations.count == 3
    assert finished.iterations.forward_tokens == 1_003
    assert finished.iterations.busy_s == pytest.approx(0.13)
    assert len(finished.iterations.decisions_ns) == 3


def test_most_items_takes_the_smallest_first_and_the_last_in_part() -> None:
    assert most_items([5.0, 1.0, 2.0], 4.0) == pytest.approx(2.2)
    assert most_items([1.0, 1.0], 4.0) == 2
    assert most_items([], 4.0) == 0


def test_the_bound_is_the_feasible_calls_or_what_compute_allows() -> None:
    few = [a_call(0, 0.0), a_call(1, 5.0), a_call(2, 6.0, feasible=False), a_call(3, 10.0)]
    assert goodput_bound(few, COSTS, 100_000) == pytest.approx(2 / 9)  # one is in the warm-up, one not feasible
    # 1,000 tokens at 0.1 ms each; from 0.9 s to 9.0 s, and 1 s more until the last first token is due.
    many = [a_call(number, number * 0.01) for number in range(901)]
    assert goodput_bound(many, COSTS, 10_000_000) == pytest.approx((8.1 + 1.0) / 0.1 / 8.1)


def figures(rate: float, throughput: float, goodput: float, jct_s: float) -> dict[str, float]:
    return {
        "calls": 100.0,
        "window_s": 100.0 / rate,
        "throughput_calls_s": throughput,
        "goodput_calls_s": goodput,
        "iteration_attainment": goodput / rate,
        "call_attainment": goodput / rate,
        "jct_mean_s": jct_s,
    }


def some_results() -> Results:
    """Rates 1 and 4. Baselines saturate at 1, we at 2 and twice as fast; the clairvoyant ones as we."""
    results: Results = {}
    for name, system in systems().items():
        if system.kind == "registered":
            continue
        best = system.kind in {"ours", "clairvoyant"}
        for rate in (1.0, 4.0):
            good = min(rate, 2.0 if best else 1.0)
            point = Point("rate", "range", 0.35, rate, name)
            results[point] = figures(rate, good, good if best else good / 2, 1.0 if best else 4.0)
    return results


def test_a_knee_is_where_a_system_no_longer_keeps_up() -> None:
    results = some_results()
    assert knee(results, "range", "orca") == 4.0
    results[Point("rate", "range", 0.35, 1.0, "orca")]["throughput_calls_s"] = 0.9
    assert knee(results, "range", "orca") == 1.0


def test_claims_are_ratios_beyond_the_knee_against_fixed_targets() -> None:
    made = {claim.name: claim for claim in claims(some_results())}
    throughput = made["throughput (calls/s): least over the baselines beyond their knee"]
    assert throughput.value == pytest.approx(2.0)
    assert throughput.holds
    assert not made["throughput (calls/s): most over the baselines beyond their knee"].holds
    assert made["goodput: least over the baselines beyond their knee"].value == pytest.approx(4.0)
    assert made["mean JCT, times shorter: least over the baselines beyond their knee"].value == pytest.approx(4.0)
    clairvoyant = made["share of the goodput of the best clairvoyant schedule, at the worst load"]
    assert clairvoyant.value == 1.0
    assert clairvoyant.holds


def test_with_brief_calls_the_best_of_the_others_counts_at_each_load() -> None:
    def figures(goodput: float, throughput: float) -> dict[str, float]:
        return {
            "goodput_calls_s": goodput, "throughput_calls_s": throughput, "window_s": 100.0, "feasible_attainment": 0.5
        }  # fmt: skip

    rivals = {
        "fcfs_512": (0.0, 0.4),
        "fcfs_2048": (0.1, 0.8),
        "srpt": (0.2, 1.0),
        "edf": (0.5, 1.0),
        FEW_LOST: (0.6, 1.0),
    }
    results = {
        Point(BRIEF, "range", 0.35, rate, system): figures(goodput, throughput)
        for rate, ours in ((1.0, (0.6, 0.76)), (8.0, (0.3, 0.7)))
        for system, (goodput, throughput) in {OURS: ours, **rivals}.items()
    }
    made = list(by_load(results))
    assert [round(claim.value, 3) for claim in made] == [3.0, 1.0, 0.95, 1.5, 0.5, 0.875]
    assert [claim.holds for claim in made] == [True, True, True, True, False, False]
    assert [claim.fails for claim in made] == [False] * 5 + [True]
    assert "it keeps 0.50, few_lost 0.50" in made[4].excused


def test_falling_behind_fcfs_at_one_load_fails_the_claim() -> None:
    results = some_results()
    results[Point("rate", "range", 0.35, 1.0, OURS)]["throughput_calls_s"] = 0.98
    name = "share of the throughput of FCFS with chunked prefill, its best budget, at the worst load"
    claim = next(claim for claim in claims(results) if claim.name == name)
    assert claim.value == pytest.approx(0.98)
    assert not claim.holds
    assert claim.where == "range TPOT at 1/s"


def test_the_quick_plan_has_the_systems_that_claims_compare() -> None:
    kinds = {name: system.kind for name, system in systems().items()}
    compared = [name for name, kind in kinds.items() if kind in {"baseline", "ours", "clairvoyant"}]
    quick = QUICK.points(())
    assert [point.system for point in quick] == [*compared, BOUND]
    assert {QUICK.seeds_of(point) for point in quick} == {FULL.seeds}


def test_the_full_plan_covers_every_system_at_every_load_but_variants() -> None:
    kinds = {name: system.kind for name, system in systems().items() if system.kind != "registered"}
    full = FULL.points(("orca",))
    steady = {(point.tpot, point.rate_per_s) for point in full if point.system == "slo_without_order"}
    assert steady == {(tpot, rate) for tpot, rates in FULL.rates.items() for rate in rates}
    varied = {point.rate_per_s for point in full if kinds.get(point.system) == "variant"}
    assert varied == set(FULL.variant_rates)
    assert {point.system for point in full} == {*kinds, BOUND}
    assert {point.figure for point in full if point.system == "orca"} == {"rate", "share", "alone", BRIEF}
    assert all(
        len(FULL.seeds_of(point)) == (len(FULL.seeds) if point.figure in {"rate", BRIEF} else 1) for point in full
    )
