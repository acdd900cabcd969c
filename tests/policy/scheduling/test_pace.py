"""What an engine's pace is measured from: iterations, and the calls of successive plans."""

from __future__ import annotations

import pytest

from plait.policy.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.scheduling.pace import PREEMPTION_ITERATIONS, START_OUTPUT_TOKENS, Measurements
from plait.policy.scheduling.plan import RECENT_ITERATIONS, LocalCall
from plait.policy.types import Objective
from tests.policy.scheduling.fake_engine import COSTS


def test_a_known_engine_starts_at_its_pivot() -> None:
    measured = Measurements()
    measured.expect(COSTS)
    pace = measured.pace(2048)
    # 90 % of 10,000 tokens/s: n / (0.01 + 1e-4 n) = 9,000 at n = 900, in 0.1 s.
    assert (pace.chunk_tokens, pace.longest_s, pace.tokens_per_s) == pytest.approx((900, 0.1, 9000))
    assert pace.shortest_s == pytest.approx(0.0101)
    assert measured.pace(512).chunk_tokens == 512, "no chunk is longer than an iteration"


def test_an_unknown_one_is_taken_to_compute_in_no_time() -> None:
    pace = Measurements().pace(2048)
    assert (pace.chunk_tokens, pace.longest_s, pace.shortest_s, pace.tokens_per_s) == (2048, 0.0, 0.0, None)


def test_the_longest_iteration_and_the_mean_chunk_are_of_the_last_128() -> None:
    measured = Measurements()
    measured.observe(9.0, [(1000, 0), (1, 50)])
    assert (measured.pace(2048).longest_s, measured.pace(2048).chunk_tokens) == (9.0, 1000)
    for number in range(RECENT_ITERATIONS):
        measured.observe(0.1, [(100 + number % 2 * 100, 0), (1, 50), (1, 50)])
    assert (measured.pace(2048).longest_s, measured.pace(2048).chunk_tokens) == (0.1, 150)


def test_an_iteration_time_model_is_fitted_where_none_is_given() -> None:
    measured = Measurements()
    for number in range(20):
        tokens = 100 * (number % 5) + 1
        measured.observe(0.01 + 1e-4 * tokens, [(tokens, 0)])
    assert measured.costs is not None
    assert measured.costs.prefill_time_s(700) == pytest.approx(0.08)


def test_iterations_that_are_all_alike_say_nothing_about_others() -> None:
    measured = Measurements()
    for _ in range(100):
        measured.observe(0.0201, [(1, 0)])
    assert measured.costs is None


def test_a_given_model_stays() -> None:
    measured = Measurements()
    measured.expect(COSTS)
    for tokens in range(1, 50):
        measured.observe(1.0, [(tokens, 0)])
    assert measured.costs is COSTS


def test_mean_outputs_are_those_of_calls_that_have_left_by_objective() -> None:
    measured = Measurements()
    assert measured.pace(1).output_tokens(None) == START_OUTPUT_TOKENS
    calls = [LocalCall(str(n), 0.0, 10, 10, 10 * (n + 1)) for n in range(2)]
    batch = LocalCall("batch", 0.0, 10, 10, 500, objective=Objective.THROUGHPUT)
    assert measured.follow(0.0, [], [*calls, batch]) == []
    assert measured.follow(1.0, [], []) == [*calls, batch]
    pace = measured.pace(1)
    assert (pace.output_tokens(None), pace.output_tokens(Objective.THROUGHPUT)) == (15, 500)
    assert pace.output_tokens(Objective.LATENCY) == START_OUTPUT_TOKENS


def test_preemptions_are_counted_per_generated_token_and_timed() -> None:
    measured, call = Measurements(), LocalCall("c", 0.0, 10, 10, 1)
    measured.follow(0.0, [], [call])
    for _ in range(10):
        measured.observe(0.1, [(1, 10), (1, 10), (50, 0)])
    assert measured.follow(1.0, [call], []) == []
    assert measured.follow(3.0, [call], []) == []
    assert measured.follow(3.5, [], [call]) == []
    pace = measured.pace(1)
    assert (pace.preemption_rate, pace.longest_preemption_s) == (1 / 20, 2.5)
    assert pace.token_s == pytest.approx(0.1 + 2.5 / 20)
    assert measured.times_preempted(call) == 1
    for _ in range(PREEMPTION_ITERATIONS):
        measured.observe(0.1, [(1, 10)])
    assert measured.pace(1).longest_preemption_s == 0.0
    measured.follow(9.0, [], [])
    assert measured.times_preempted(call) == 0, "it has left"


def test_a_call_that_leaves_while_preempted_is_forgotten() -> None:
    measured, call = Measurements(), LocalCall("c", 0.0, 10, 10, 4)
    measured.follow(0.0, [], [call])
    measured.follow(1.0, [call], [])
    assert measured.follow(2.0, [], []) == [call]
    assert measured.follow(3.0, [], []) == []


def test_the_fit_tells_apart_what_an_iteration_computes_reads_and_attends_to() -> None:
    costs = CostModel(PiecewiseLinear(((0, 0.01),), 1e-4), 0.0, 1e-7, 0.0, LongAttention(product_s=1e-9))
    measured = Measurements()
    for number in range(60):
        work = [(100 + 37 * number % 900, 500 * (number % 7)), *[(1, 300 * (number % 11))] * (number % 5)]
        measured.observe(costs.iteration_time_s(work), work)
    assert measured.costs is not None
    for work in ([(64, 0)], [(500, 8000), (1, 100)], [(1, 4000)] * 30):
        assert measured.costs.iteration_time_s(work) == pytest.approx(costs.iteration_time_s(work), rel=1e-3)


def test_small_iterations_take_as_long_as_decodes_alone() -> None:
    measured = Measurements()
    for number in range(40):
        measured.observe(0.03, [(1, 0)] * 4)
        tokens = 400 + 100 * (number % 8)
        measured.observe(0.01 + 1e-4 * tokens, [(tokens, 0)])
    assert measured.costs is not None
    assert measured.costs.iteration_time_s([(1, 0)] * 4) == pytest.approx(0.03)
    assert measured.costs.prefill_time_s(100) == pytest.approx(0.03, rel=1e-3)
    assert measured.costs.prefill_time_s(600) == pytest.approx(0.07, rel=1e-3)
