"""JCTs as iteration SLOs: a decode's time left, in equal parts over the tokens that it is expected to generate."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.scheduling.outputs import CallClass, Outputs
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.plan import LocalCall
from plait.policy.scheduling.slo import Objectives
from plait.policy.types import Slo
from tests.policy.scheduling.fake_engine import FakeEngine, decode, names, prompt, slo_scheduler

PACE = Pace(longest_s=0.2, shortest_s=0.01, chunk_tokens=500.0, tokens_per_s=5000.0)

jobs = st.builds(
    LocalCall,
    st.just("c"),
    arrived_s=st.floats(0, 20),
    prompt_tokens=st.just(10),
    computed_tokens=st.just(10),
    output_tokens=st.integers(1, 400),
    slo=st.floats(0.1, 60).map(lambda jct_s: Slo(jct_s=jct_s)),
    max_output_tokens=st.none() | st.integers(1, 500),
)


@given(
    calls=st.lists(jobs, max_size=5),
    outputs=st.lists(st.integers(1, 500), min_size=1, max_size=9),
    shortest_s=st.floats(0, 0.2),
)
def test_jcts_limit_an_iteration_to_the_least_time_left_for_each_token_to_come(
    calls: list[LocalCall], outputs: list[int], shortest_s: float
) -> None:
    recent: dict[CallClass, Outputs] = {(None, True): Outputs(tuple(sorted(outputs)), 1.0)}
    pace = Pace(longest_s=0.2, shortest_s=shortest_s, chunk_tokens=1.0, outputs=recent)
    tightest_s, now_s = inf, 20.0
    for call in calls:
        assert call.slo is not None
        assert call.slo.jct_s is not None
        left_s = call.slo.jct_s - (now_s - call.arrived_s)
        if left_s >= shortest_s:
            tightest_s = min(tightest_s, max(shortest_s, left_s / pace.tokens_to_come(call)))
    assert Objectives().tightest_s(calls, now_s, pace) == (inf, tightest_s)


@pytest.mark.parametrize(("passed_s", "tightest_s"), [(0.0, 0.02), (1.0, 0.01), (1.99, 0.01), (1.995, inf), (3.0, inf)])
def test_a_call_behind_goes_on_at_the_shortest_iteration_until_its_jct_passes(
    passed_s: float, tightest_s: float
) -> None:
    recent: dict[CallClass, Outputs] = {(None, True): Outputs((101,), 101.0)}
    pace = Pace(longest_s=0.2, shortest_s=0.01, chunk_tokens=1.0, outputs=recent)
    call = LocalCall("c", 0.0, 10, 10, 1, slo=Slo(jct_s=2.0))
    assert Objectives().tightest_s([call], passed_s, pace) == pytest.approx((inf, tightest_s))


@pytest.mark.parametrize(("passed_s", "tightest_s"), [(0.0, 0.03), (0.95, 0.03), (0.98, 0.0102), (1.5, 0.01)])
def test_a_jct_leaves_prompts_their_step_while_it_has_the_time(passed_s: float, tightest_s: float) -> None:
    """100 tokens to come, of 10 ms each; an iteration with a prompt takes 30 ms."""
    recent: dict[CallClass, Outputs] = {(None, True): Outputs((101,), 101.0)}
    pace = Pace(longest_s=0.2, shortest_s=0.01, prompt_s=0.03, chunk_tokens=1.0, outputs=recent)
    call = LocalCall("c", 0.0, 10, 10, 1, slo=Slo(jct_s=2.0))
    assert Objectives().tightest_s([call], passed_s, pace) == pytest.approx((inf, tightest_s))


def test_a_jct_that_was_deduced_does_not_limit_iterations() -> None:
    """The calls of a task group share it. Faster tokens of some would keep the prompts of the others waiting."""
    call = LocalCall("c", 0.0, 10, 10, 1, slo=Slo(jct_s=2.0, is_deduced=True))
    assert Objectives().tightest_s([call], 0.0, PACE) == (inf, inf)


def test_a_tpot_counts_and_not_the_jct_beside_it() -> None:
    call = LocalCall("c", 0.0, 10, 10, 1, slo=Slo(tpot_s=0.1, jct_s=2.0))
    assert Objectives().tightest_s([call], 0.0, PACE) == pytest.approx((0.1, inf))
    call.slo = Slo(tpot_s=0.005, jct_s=2.0)
    assert Objectives().tightest_s([call], 0.0, PACE) == (inf, inf)


@pytest.mark.parametrize(("limit", "each_s"), [(None, 5.0 / 210), (101, 5.0 / 100), (2, 5.0)])
def test_a_decode_with_a_jct_limits_the_prompts_beside_it(limit: int | None, each_s: float) -> None:
    job = decode("job", slo=Slo(jct_s=5.0))
    job.max_output_tokens = limit
    plan = FakeEngine(max_batch_tokens=5000, running=[job], waiting=[prompt("prompt", 5000)]).plan(slo_scheduler())
    tokens = sum(tokens for _, tokens in plan.picks)
    assert tokens == pytest.approx(min((each_s - 0.01) / 1e-4, 5000), abs=1)


@given(now_s=st.floats(0, 20), limit=st.none() | st.integers(2, 500))
def test_a_jct_that_no_iteration_can_keep_cuts_no_prompt(now_s: float, limit: int | None) -> None:
    job = decode("job", slo=Slo(jct_s=0.01))
    job.max_output_tokens = limit
    plan = FakeEngine(running=[job], waiting=[prompt("prompt", 5000)]).plan(slo_scheduler(), now_s)
    assert names(plan) == [("job", 1), ("prompt", 999)]
