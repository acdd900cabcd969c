"""What an iteration computes, against sums over its calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.scheduling.plan import IterationWork

Calls = list[tuple[int, int]]

calls_of_an_iteration = st.lists(st.tuples(st.integers(1, 3) | st.integers(1, 4096), st.integers(0, 100_000)))


def work_of(calls: Calls) -> IterationWork:
    return IterationWork.of([new for new, _ in calls], [context for _, context in calls])


@given(calls_of_an_iteration)
def test_the_sums_are_those_of_the_calls(calls: Calls) -> None:
    chunks = tuple((new, context) for new, context in calls if new > 1)
    assert work_of(calls) == IterationWork(
        new_tokens=sum(new for new, _ in calls),
        sequence_tokens=sum(new + context for new, context in calls),
        decodes=len(calls) - len(chunks),
        chunks=chunks,
    )


@given(calls_of_an_iteration.filter(bool))
def test_a_linear_cost_model_needs_no_more_than_the_sums(calls: Calls) -> None:
    costs = CostModel(PiecewiseLinear(((0, 0.01),), 1e-4), 0.0, 1e-7, 0.0, LongAttention(product_s=1e-9))
    work = work_of(calls)
    products = sum(new * (new + context) for new, context in work.chunks)
    time_s = 0.01 + 1e-4 * work.new_tokens + 1e-7 * work.sequence_tokens + 1e-9 * products
    assert abs(costs.iteration_time_s(calls) - time_s) < 1e-9 + 1e-9 * time_s
