"""Token budgets: the iteration-time model solved, by hand and against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.profiles import load_profile
from plait.policy.scheduling.chunking import Budget, model_budget
from plait.policy.scheduling.iteration_model import IterationModel, scaled
from tests.examples import examples
from tests.policy.scheduling.fake_engine import COSTS


def test_without_a_model_only_the_engines_maximum_counts() -> None:
    budget = model_budget(2048, IterationModel())
    budget.limit_s = 1e-9
    assert (budget.room(10_000), budget.time_s(500)) == (2048, 0.0)
    budget.take_decodes(48, 900)
    assert (budget.room(10_000), budget.room(30)) == (2000, 30)


def test_the_model_is_solved_for_the_tokens() -> None:
    model = IterationModel()
    model.expect(COSTS)
    budget = model_budget(2048, model)
    budget.take_decodes(8, 8 * 100)
    budget.limit_s = 0.06001  # 10 ms + 0.1 ms n: 500 tokens
    assert budget.room(10_000) == 492
    assert budget.room(30) == 30
    budget.take(492)
    assert budget.room(1) == 0
    assert budget.time_s() == pytest.approx(0.06)


work = st.lists(st.tuples(st.integers(1, 600), st.integers(0, 5000)), max_size=6)


@settings(deadline=None, max_examples=examples(200))
@given(
    work=work,
    wanted=st.integers(1, 700),
    context=st.integers(0, 9000),
    limit_s=st.floats(0.0, 0.4),
    step_s=st.floats(0.0, 0.1),
    decodes=st.sampled_from([0.4, 1.0, 2.5]),
)
def test_room_is_the_most_that_stays_within_the_limit(
    *, work: list[tuple[int, int]], wanted: int, context: int, limit_s: float, step_s: float, decodes: float
) -> None:
    costs = scaled(load_profile("a6000-mistral-7b").cost_model(), decodes, 1.0, step_s)
    budget = Budget(2048, costs)
    for new, behind in work:
        budget.take(new, behind)
    assert budget.time_s() == pytest.approx(costs.iteration_time_s(work))
    budget.limit_s = limit_s
    if any(new > 1 for new, _ in work):
        limit_s = max(limit_s, costs.iteration_time_s(work))  # what takes no longer than that is for nothing
    room, most = budget.room(wanted, context), max(0, min(wanted, 2048 - sum(new for new, _ in work)))
    assert 0 <= room <= most
    assert room == 0 or costs.iteration_time_s([*work, (room, context)]) <= limit_s + 1e-9
    if room < most:
        more = max(2, room + 1)  # a single token of a longer prompt would cost a step
        assert costs.iteration_time_s([*work, (more, context)]) > limit_s - 1e-9


@pytest.mark.parametrize("budget", [Budget(2048, COSTS), model_budget(2048, IterationModel())])
def test_what_is_given_back_was_never_taken(budget: Budget) -> None:
    budget.take(300, 50)
    before_s = budget.time_s()
    budget.take(1000, 400)
    budget.give_back(1000, 400)
    assert budget.tokens == 300
    assert budget.time_s() == pytest.approx(before_s)


def test_a_prompts_last_token_that_does_not_fit_gets_none() -> None:
    """On an engine that decodes slower than it prefills, two tokens of a prompt may take less than one."""
    budget = Budget(2048, scaled(load_profile("h200-llama-8b").cost_model(), 1.8, 0.5, 0.0))
    budget.limit_s = 5e-3
    assert budget.time_s(2) < budget.limit_s < budget.time_s(1)
    assert budget.room(1) == 0
