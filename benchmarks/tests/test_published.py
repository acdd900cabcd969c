"""AccelGen's own choices, in numbers that can be checked by hand."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.schedulers.published import (
    ChunkedObjectives,
    JctSpread,
    PivotBudget,
    SpreadObjectives,
    pivot_budget,
)
from plait.policy.cost_model import Pivot
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.plan import LocalCall
from plait.policy.types import Slo
from tests.policy.scheduling.fake_engine import COSTS

PACE = Pace(longest_s=0.2, shortest_s=0.01, chunk_tokens=500.0, tokens_per_s=5000.0)


@pytest.mark.parametrize(("slo_s", "tokens"), [(0.05, 250), (0.1, 500), (0.3, 1500), (9.0, 2048), (inf, 2048), (0, 0)])
def test_equation_6(slo_s: float, tokens: int) -> None:
    budget = PivotBudget(2048, Pivot(500, 0.1))
    budget.limit_s = slo_s
    assert budget.room(10_000) == tokens
    budget.take(100)
    assert budget.room(10_000) == max(0, tokens - 100)


def test_equation_6_at_the_engines_pivot() -> None:
    model = IterationModel()
    model.expect(COSTS)
    budget = pivot_budget(2048, model)
    budget.limit_s = 0.05
    assert budget.room(10_000) == 450, "the pivot is at 900 tokens and 0.1 s"


def test_without_a_pivot_only_the_engines_maximum_counts() -> None:
    budget = pivot_budget(2048, IterationModel())
    budget.limit_s = 1e-9
    assert (budget.room(10_000), budget.time_s(500)) == (2048, 0.0)


def test_what_is_given_back_was_never_taken() -> None:
    budget = PivotBudget(2048, Pivot(500, 0.1))
    budget.take(300, 50)
    before_s = budget.time_s()
    budget.take(1000, 400)
    budget.give_back(1000, 400)
    assert budget.tokens == 300
    assert budget.time_s() == pytest.approx(before_s)


def test_a_prompts_remaining_time_is_its_slo_less_waiting_and_a_longest_iteration_a_chunk() -> None:
    call, slo = LocalCall("c", 10.0, 1200), Slo(ttft_s=1.0)
    remaining_s, due_s = ChunkedObjectives().timer(10.3, PACE)(call, slo, 1200)
    assert due_s == pytest.approx(1.0 - 0.3)
    assert remaining_s == pytest.approx(1.0 - 0.3 - 3 * 0.2)


def test_a_decode_is_one_chunk() -> None:
    objectives, slo = ChunkedObjectives(), Slo(ttft_s=1.0, tpot_s=0.1)
    call = LocalCall("c", 0.0, 10, 10, 1, slo=slo)
    objectives.on_plan(5.0, [call], [])
    call.output_tokens = 3
    assert objectives.timer(5.25, PACE)(call, slo, 1)[0] == pytest.approx(0.05 - 0.2)


SPREAD = JctSpread.over(
    10.0, 0.6, 3, 7, Pace(longest_s=0.2, shortest_s=0.0, chunk_tokens=1, preemption_rate=0.25, longest_preemption_s=0.4)
)
"""T_e = 0.6 + 7 (0.2 + 0.4 x 0.25) = 2.7 s over 3 + 7 iterations."""


def test_a_jobs_slack_is_spread_over_its_iterations() -> None:
    assert SPREAD.slack_s == pytest.approx((10.0 - 2.7) / 10)
    assert SPREAD.iteration_s == pytest.approx(0.27)
    assert SPREAD.remaining_s(0.0, 0) == pytest.approx(0.73)


@pytest.mark.parametrize(("waited_s", "next_s"), [(0.73, 0.73), (0.73 + 0.5, 0.73 - 0.5), (0.73 - 0.3, 0.73 + 0.3)])
def test_what_an_iteration_over_or_underuses_is_carried_on(waited_s: float, next_s: float) -> None:
    assert SPREAD.remaining_s(waited_s + 0.27, 1) == pytest.approx(next_s)


def test_a_job_that_outlives_its_timetable_has_what_is_left_of_it() -> None:
    assert SPREAD.remaining_s(9.0, 9) == SPREAD.remaining_s(9.0, 50) == pytest.approx(10 * 0.73 - (9.0 - 9 * 0.27))


def test_a_jobs_remaining_time_is_its_share_for_the_next_iteration() -> None:
    pace = Pace(longest_s=0.2, shortest_s=0.0, chunk_tokens=500.0, mean_outputs={None: 7.0})
    call, slo = LocalCall("c", 0.0, 1200), Slo(jct_s=10.0)
    # (10 - (0.6 + 1.4)) / (3 + 7) = 0.8 an iteration; 0.25 s have been waited.
    remaining_s, due_s = SpreadObjectives().timer(0.25, pace)(call, slo, 1200)
    assert due_s is None
    assert remaining_s == pytest.approx(0.8 - 0.25)


def test_a_job_that_runs_keeps_its_timetable_and_limits_iterations_until_it_has_ended() -> None:
    def paced(longest_s: float) -> Pace:
        return Pace(longest_s=longest_s, shortest_s=0.0, chunk_tokens=500.0, mean_outputs={None: 9.0})

    objectives, call = SpreadObjectives(), LocalCall("c", 0.0, 10, 10, 1, slo=Slo(jct_s=10.0))
    objectives.on_plan(0.0, [call], [])
    # 10 s over 1 + 9 iterations: 1 s each, of which 0.2 s compute; two are through after 1.5 s.
    assert objectives.tightest_s([call], 1.5, paced(0.2)) == pytest.approx(max(1.0, 3 * 0.8 - (1.5 - 2 * 0.2) + 0.2))
    assert objectives.tightest_s([call], 1.5, paced(0.5)) == pytest.approx(1.5), "as it was when it started"
    objectives.on_plan(2.0, [], [call])
    assert objectives.tightest_s([call], 1.5, paced(0.5)) == pytest.approx(3 * 0.5 - (1.5 - 2 * 0.5) + 0.5)
