"""Objectives to remaining times and iteration SLOs, in numbers that can be checked by hand."""

from __future__ import annotations

from math import inf

import pytest

from plait.policy.scheduling.outputs import Outputs
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.plan import LocalCall
from plait.policy.scheduling.slo import Objectives, chunked_execution, pivot_execution, token_slo_s
from plait.policy.types import Objective, Slo

PACE = Pace(longest_s=0.2, shortest_s=0.01, chunk_tokens=500.0, tokens_per_s=5000.0)


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 1), (500, 1), (501, 2), (1200, 3)])
def test_what_is_left_takes_the_longest_iteration_a_chunk(tokens: int, chunks: int) -> None:
    assert chunked_execution(PACE).of(tokens) == pytest.approx(chunks * 0.2)


def test_or_as_long_as_at_the_pivots_throughput() -> None:
    assert pivot_execution(PACE).of(1200) == pytest.approx(0.01 + 1200 / 5000)
    unknown = Pace(longest_s=0.2, shortest_s=0.0, chunk_tokens=500.0)
    assert pivot_execution(unknown).of(1200) == pytest.approx(0.6), "until a throughput is known"


def test_a_prompts_remaining_time_is_its_slo_less_waiting_and_execution() -> None:
    call, slo = LocalCall("c", 10.0, 1200), Slo(ttft_s=1.0)
    remaining_s, due_s = Objectives().timer(10.3, PACE)(call, slo, 1200)
    assert due_s == pytest.approx(1.0 - 0.3)
    assert remaining_s == pytest.approx(1.0 - 0.3 - (0.01 + 1200 / 5000))


def test_before_its_first_token_a_tpot_alone_sets_no_time() -> None:
    assert Objectives().timer(0.0, PACE)(LocalCall("c", 0.0, 10), Slo(tpot_s=0.1), 10) == (inf, None)


def test_the_nth_token_is_due_n_tpot_after_the_first() -> None:
    objectives, slo = Objectives(), Slo(ttft_s=1.0, tpot_s=0.1)
    call = LocalCall("c", 0.0, 10, 10, 1, slo=slo)
    objectives.on_plan(5.0, [call], [])
    call.output_tokens = 3
    objectives.on_plan(5.15, [call], [])
    assert objectives.due_s(call, slo, 5.25) == pytest.approx(5.0 + 3 * 0.1 - 5.25)
    assert objectives.tightest_s([call], 5.15, PACE)[0] == pytest.approx(0.15), "half a token ahead: all of it at once"
    assert objectives.timer(5.25, PACE)(call, slo, 1)[0] == pytest.approx(0.05 - (0.01 + 1 / 5000))


@pytest.mark.parametrize(
    ("left_s", "expected_tokens", "slo_s"),
    [(0.1, 10, 0.1), (0.4, 10, 0.4), (-0.1, 10, 0.08), (-0.1, 0, -0.1), (0.05, 5, 0.09)],
)
def test_who_is_behind_makes_it_up_over_the_tokens_to_come(left_s: float, expected_tokens: float, slo_s: float) -> None:
    assert token_slo_s(0.1, left_s, expected_tokens) == pytest.approx(slo_s)


def test_what_no_iteration_can_keep_does_not_bind() -> None:
    call = LocalCall("c", 0.0, 10, 10, 1, slo=Slo(tpot_s=0.005))
    assert Objectives().tightest_s([call], 0.0, PACE) == (inf, inf)


def test_a_jobs_remaining_time_is_its_whole_slack() -> None:
    pace = Pace(longest_s=0.2, shortest_s=0.0, chunk_tokens=500.0, outputs={(None, True): Outputs((40,), 40.0)})
    slo = Slo(jct_s=10.0)
    call = LocalCall("c", 0.0, 1200, slo=slo)
    remaining_s, due_s = Objectives().timer(0.25, pace)(call, slo, 1200)
    assert due_s is None
    assert remaining_s == pytest.approx(10.0 - 0.25 - 0.6 - 40 * 0.2)
    call.max_output_tokens = 7
    assert Objectives().timer(0.25, pace)(call, slo, 1200)[0] == pytest.approx(10.0 - 0.25 - 0.6 - 7 * 0.2)


def test_the_default_is_for_calls_that_say_nothing() -> None:
    reading = Slo(tpot_s=0.1875)
    objectives = Objectives(default=reading)
    assert objectives.of(LocalCall("c", 0.0, 1)) is reading
    assert objectives.of(LocalCall("c", 0.0, 1, slo=Slo(ttft_s=1.0))) == Slo(ttft_s=1.0)
    assert objectives.of(LocalCall("c", 0.0, 1, objective=Objective.THROUGHPUT)) is None
    assert Objectives().of(LocalCall("c", 0.0, 1)) is None
