"""How long an iteration may be for calls that are late or have no objectives, while calls with a TTFT may arrive.

An iteration takes 10 ms, 0.1 ms for each new token and 0.02 ms for each token of context. Its pivot is at 900 tokens.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.cost_model import CostModel, LongAttention
from plait.policy.scheduling.slo_scheduler import SloScheduler
from tests.policy.scheduling.fake_engine import COSTS, FakeEngine, names, prompt, slo_scheduler

LINEAR = replace(COSTS, context_s=2e-5)
QUADRATIC = replace(COSTS, long_attention=LongAttention(product_s=2e-8))
PIVOT_TOKENS = 900


def hurried(costs: CostModel = LINEAR, *, slack_s: float = 0.002) -> SloScheduler:
    """A scheduler of which the recent calls had so much TTFT slack. All have ended at 1 s."""
    scheduler = slo_scheduler(costs=costs)
    started = prompt("started", 100, costs.prefill_time_s(100) + slack_s)
    engine = FakeEngine(waiting=[started])
    engine.plan(scheduler)
    engine.waiting, engine.running = [], [started]
    started.computed_tokens, started.output_tokens = 100, 1
    engine.plan(scheduler, 1.0)
    return scheduler


def late(scheduler: SloScheduler, *prompts: tuple[int, int], max_batch_tokens: int = 4_000) -> list[int]:
    """The tokens that running prompts get which have missed their TTFT; each has so many tokens, of them computed."""
    engine = FakeEngine(max_batch_tokens=max_batch_tokens)
    for number, (tokens, computed_tokens) in enumerate(prompts):
        engine.running.append(prompt(f"late-{number}", tokens, 0.01))
        engine.running[-1].computed_tokens = computed_tokens
    taken = dict(names(engine.plan(scheduler, 2.0)))
    return [taken.get(call.call_id, 0) for call in engine.running]


@pytest.mark.parametrize("computed_tokens", [0, 1_000, 4_500, 20_000, 100_000])
@pytest.mark.parametrize("costs", [COSTS, LINEAR, QUADRATIC], ids=["no attention", "linear", "quadratic"])
def test_a_late_prompt_goes_on_with_the_pivots_tokens_however_long_its_context_is(
    costs: CostModel, computed_tokens: int
) -> None:
    """In the time of the pivot without context, 118 ms, 150 tokens fit after 4,500 and none after 20,000."""
    assert late(hurried(costs), (computed_tokens + 2_000, computed_tokens)) == [PIVOT_TOKENS]


def test_the_end_of_a_late_prompt_is_not_cut() -> None:
    assert late(hurried(), (6_000, 5_800)) == [200]


def test_the_longest_context_counts() -> None:
    """The limit is 208 ms. The short prompt takes 22 ms of it, and the context of the long one 90 ms."""
    assert late(hurried(), (600, 500), (6_000, 4_500)) == [100, 716]


def test_with_slack_an_iteration_takes_half_of_it_whatever_the_context() -> None:
    scheduler = hurried(slack_s=0.3)
    assert late(scheduler, (9_000, 1_000)) == [1_000], "150 ms: 10, 20 for the context, and 0.12 for each of the tokens"


def test_the_pivot_is_no_more_than_the_engines_maximum() -> None:
    assert late(hurried(), (9_000, 4_500), max_batch_tokens=500) == [500]


@given(computed_tokens=st.integers(0, 50_000), left_tokens=st.integers(1, 5_000))
def test_a_lone_late_prompt_needs_no_more_iterations_than_of_the_pivots_size(
    computed_tokens: int, left_tokens: int
) -> None:
    (taken,) = late(hurried(), (computed_tokens + left_tokens, computed_tokens))
    assert taken == min(left_tokens, PIVOT_TOKENS)
