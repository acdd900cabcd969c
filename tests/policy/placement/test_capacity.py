"""How much throughput an engine keeps beside a latency call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.placement.capacity import CALL_TOKENS, LEAST_RATIO, capacity_ratio, decode_iteration_s

LINEAR = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
"""10 ms an iteration and 1 ms a new token; the pivot is at 90 tokens and takes 100 ms, which is 900 tokens a second."""

COSTS = st.builds(
    CostModel,
    forward=st.builds(
        lambda flat_s, rise_s, slope_s: PiecewiseLinear(((1, flat_s), (64, flat_s + rise_s)), slope_s),
        *(st.floats(0.001, 0.05), st.floats(0, 0.05), st.floats(1e-6, 1e-3)),
    ),
    context_constant_s=st.floats(0, 0.001),
    context_s=st.floats(0, 1e-6),
    context_floor_s=st.floats(0, 0.001),
    long_attention=st.just(LongAttention(0, 1e-6, 1e-6, 1e-9)),
    efficiency=st.floats(0.5, 1),
)


@given(costs=COSTS, calls=st.integers(0, 200), context=st.integers(0, 5_000))
def test_an_iteration_of_decodes_is_what_the_cost_model_says(costs: CostModel, calls: int, context: int) -> None:
    assert decode_iteration_s(costs, calls, context) == pytest.approx(costs.iteration_time_s([(1, context)] * calls))


@pytest.mark.parametrize(
    ("tpot_s", "kv_tokens", "ratio"),
    [
        (0.040, None, 750 / 900),  # 30 tokens in 40 ms against the pivot
        (0.040, 190 * CALL_TOKENS, 750 / 950),  # against 190 calls in 200 ms
        (0.040, 20 * CALL_TOKENS, 1.0),  # the cache does not hold more calls than the promise allows
        (0.011, None, 1 / 0.011 / 900),  # one call
        (0.010, None, LEAST_RATIO),  # not even one
        (1.0, None, 1.0),
    ],
)
def test_the_ratio_is_of_decode_rates(tpot_s: float, kv_tokens: int | None, ratio: float) -> None:
    assert capacity_ratio(LINEAR, tpot_s, kv_tokens) == pytest.approx(ratio)


def test_nothing_is_lost_where_an_iteration_takes_as_long_whatever_is_in_it() -> None:
    flat = CostModel(PiecewiseLinear(((0, 0.010),), 0.0), 0.0, 0.0, 0.0, LongAttention())
    assert capacity_ratio(flat, 0.040, None) == 1.0


@given(costs=COSTS, tpot_s=st.floats(0.001, 0.2), kv_tokens=st.none() | st.integers(1, 500_000))
def test_a_share_is_always_left(costs: CostModel, tpot_s: float, kv_tokens: int | None) -> None:
    assert LEAST_RATIO <= capacity_ratio(costs, tpot_s, kv_tokens) <= 1.0
