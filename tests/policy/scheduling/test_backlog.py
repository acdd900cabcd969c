"""How long an iteration may be for calls that are late or have no objectives, while calls with a TTFT may arrive.

An iteration takes 10 ms, 0.1 ms for each new token and, unless a test says otherwise, 0.02 ms for each of context.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.scheduling.plan import InFlight, IterationWork
from plait.policy.scheduling.slo_scheduler import SloScheduler
from plait.policy.types import Slo
from tests.policy.scheduling.fake_engine import COSTS, FakeEngine, decode, names, prompt, slo_scheduler

LINEAR = replace(COSTS, context_s=2e-5)
QUADRATIC = replace(COSTS, long_attention=LongAttention(product_s=2e-8))


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


def late(scheduler: SloScheduler, *prompts: tuple[int, int], in_flight: InFlight | None = None) -> list[int]:
    """The tokens that running prompts get which have missed their TTFT; each has so many tokens, of them computed."""
    engine = FakeEngine(max_batch_tokens=4_000, in_flight=in_flight)
    for number, (tokens, computed_tokens) in enumerate(prompts):
        engine.running.append(prompt(f"late-{number}", tokens, 0.01))
        engine.running[-1].computed_tokens = computed_tokens
    taken = dict(names(engine.plan(scheduler, 2.0)))
    return [taken.get(call.call_id, 0) for call in engine.running]


@pytest.mark.parametrize("computed_tokens", [0, 1_000, 4_500, 20_000, 100_000])
@pytest.mark.parametrize("costs", [COSTS, LINEAR, QUADRATIC], ids=["no attention", "linear", "quadratic"])
def test_a_late_prompt_goes_on_however_long_its_context_is(costs: CostModel, computed_tokens: int) -> None:
    """The least limit, 32 ms, is less than the context of 4,500 tokens takes."""
    (taken,) = late(hurried(costs, slack_s=0.02), (computed_tokens + 2_000, computed_tokens))
    free = 2 if costs is LINEAR and computed_tokens > 1_000 else 1
    assert taken >= free


def test_the_end_of_a_late_prompt_is_not_cut() -> None:
    assert late(hurried(COSTS), (6_000, 5_900)) == [100]


@pytest.mark.parametrize(("slack_s", "tokens"), [(0.3, 1400), (0.1, 400), (0.03, 220), (0.009, 220), (0.002, 4_000)])
def test_an_iteration_takes_a_share_of_the_slack_but_some_shortest_iterations_in_any_case(
    slack_s: float, tokens: int
) -> None:
    """10 ms, and 0.1 ms for each token: half of the slack, and at least 32 ms.

    With 2 ms of slack hardly any arrival could be in time after the rest of an iteration of 32 ms.
    """
    assert late(hurried(COSTS, slack_s=slack_s), (9_000, 1_000)) == [pytest.approx(tokens, abs=3)]


def test_an_engine_that_plans_ahead_takes_less_since_arrivals_wait_for_two_iterations() -> None:
    scheduler = hurried(COSTS, slack_s=0.3)
    flying = InFlight(IterationWork.of([100], [0]), 2.0)
    assert late(scheduler, (9_000, 1_000), in_flight=flying) == [950], "0.35 of the slack is 105 ms"


@given(step_s=st.floats(0.0, 0.2), slack_s=st.floats(0.001, 0.4), computed_tokens=st.integers(0, 50_000))
def test_what_a_step_computes_in_its_time_is_taken(step_s: float, slack_s: float, computed_tokens: int) -> None:
    """A prompt never costs the step for less than the step computes, and never gets nothing."""
    costs = replace(COSTS, context_s=1e-7, step_s=step_s)
    (taken,) = late(hurried(costs, slack_s=slack_s), (computed_tokens + 5_000, computed_tokens))
    assert taken > 1
    if taken < 4_000:
        assert costs.prefill_time_s(taken + 1, computed_tokens) > step_s


def test_no_limit_below_a_step_admits_a_sliver_that_costs_all_of_it() -> None:
    costs = replace(COSTS, step_s=0.05)
    engine = FakeEngine(running=[decode("tight", slo=Slo(tpot_s=0.03))], waiting=[prompt("long", 5_000)])
    assert names(engine.plan(slo_scheduler(costs=costs))) == [("tight", 1)]
    engine.running[0].slo = Slo(tpot_s=0.06)
    assert names(engine.plan(slo_scheduler(costs=costs))) == [("tight", 1), ("long", 498)]


@pytest.mark.parametrize("decodes", [0, 40])
def test_a_step_in_the_curve_is_taken_whole_whatever_attention_adds(decodes: int) -> None:
    """All prompts of up to 900 tokens take 50 ms, and attention to the context 2 ms more for each 100 tokens."""
    flat = PiecewiseLinear(((1, 0.05), (900, 0.05)), 1e-4)
    costs = replace(COSTS, with_prompts=flat, context_s=1e-9, long_attention=LongAttention(product_s=2e-9))
    engine = FakeEngine(max_batch_tokens=4_000, max_running_calls=100)
    engine.running = [decode(f"decode-{number}") for number in range(decodes)]
    engine.running.append(prompt("late", 20_000, 0.01))
    engine.running[-1].computed_tokens = 10_000
    taken = dict(names(engine.plan(hurried(costs, slack_s=0.06), 2.0)))["late"]
    assert taken >= 850 - decodes


def test_while_calls_wait_that_have_missed_their_slo_an_engine_that_plans_ahead_takes_more() -> None:
    engine = FakeEngine(max_batch_tokens=4_000, in_flight=InFlight(IterationWork.of([100], [0]), 2.0))
    engine.running = [prompt("late", 9_000, 0.01)]
    for waiting, tokens in ((), 950), ((prompt("missed", 100, 0.01),), 1_400):
        engine.waiting = list(waiting)
        plan = engine.plan(hurried(COSTS, slack_s=0.3), 2.0)
        assert sum(taken for _, taken in plan.picks) == pytest.approx(tokens, abs=3)


@pytest.mark.parametrize("jct_s", [0.5, 3.0, 60.0])
def test_prompts_with_a_jct_leave_arrivals_with_a_ttft_their_time(jct_s: float) -> None:
    """Half of 0.3 s of slack, whether by its JCT the prompt is late, nearly late or early."""
    job = prompt("job", 9_000)
    job.slo, job.computed_tokens = Slo(jct_s=jct_s), 1_000
    engine = FakeEngine(max_batch_tokens=8_000, running=[job])
    assert dict(names(engine.plan(hurried(COSTS, slack_s=0.3), 0.0))) == {"job": pytest.approx(1_400, abs=3)}


def test_a_first_token_that_is_due_sooner_is_computed_beside_a_late_prompt_with_a_jct() -> None:
    """By the expected length of its output the job is some seconds late. Most of it has been computed."""
    job, chat = prompt("job", 9_000), prompt("chat", 1_000, 0.25)
    job.slo, job.computed_tokens = Slo(jct_s=2.0), 7_000
    engine = FakeEngine(max_batch_tokens=8_000, running=[job], waiting=[chat])
    assert dict(names(engine.plan(hurried(COSTS, slack_s=0.3), 0.0))) == {
        "chat": 1_000,
        "job": pytest.approx(1_400, abs=3),
    }


def test_the_jct_of_a_decode_does_not_keep_first_tokens_waiting_that_are_due() -> None:
    """The JCT leaves each of the decode's 100 tokens to come 20 ms, and prompts 9 ms of these."""
    job, chat, later = decode("job", slo=Slo(jct_s=2.0)), prompt("chat", 1_000, 0.25), prompt("later", 1_000, 60.0)
    job.max_output_tokens = 101
    engine = FakeEngine(max_batch_tokens=8_000, running=[job], waiting=[chat])
    assert dict(names(engine.plan(hurried(COSTS, slack_s=0.3), 0.0)))["chat"] == 1_000
    engine.waiting = [later]
    assert dict(names(engine.plan(hurried(COSTS, slack_s=0.3), 0.0)))["later"] < 100
