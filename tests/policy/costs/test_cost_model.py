"""The cost model against published regressions computed by hand, and against what any cost model must do."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.costs.cost_model import PIVOT_SHARE, CostModel, LongAttention, PiecewiseLinear, Pivot

A6000_MISTRAL_7B = CostModel(
    forward=PiecewiseLinear(((192, 0.022), (384, 0.04584527264)), 1.0842571e-4),
    context_constant_s=1.59e-4,
    context_s=1.86e-7,
    context_floor_s=3.2e-4,
    long_attention=LongAttention(1 << 20, 1.13e-6, 1.75e-6, 2.19e-9),
    efficiency=0.9,
)
H100_LLAMA_70B = CostModel(
    forward=PiecewiseLinear(((1, 0.018747),), 7.988e-5),
    context_constant_s=0.0,
    context_s=5.4e-8,
    context_floor_s=0.0,
    long_attention=LongAttention(0, 0.0, 2.631e-6, 7.444e-10),
)

TOKENS = st.integers(0, 40_000)
MODELS = st.sampled_from([A6000_MISTRAL_7B, H100_LLAMA_70B])


@pytest.mark.parametrize(
    ("new", "context", "milliseconds"),
    [
        # n = 512: 0.10842571 n + 4.2098 = 59.7238; attention at 512 is its floor, 0.32; / 0.9.
        (512, 0, (0.10842571 * 512 + 4.2098 + 0.32) / 0.9),
        # The same behind 1,488 cached tokens: attention 1.86e-4 x 2000 + 0.159; 512 x 2000 is not above 2^20.
        (512, 1488, (0.10842571 * 512 + 4.2098 + 1.86e-4 * 2000 + 0.159) / 0.9),
        # n = 1024 behind 1,024 exceeds 2^20: 1.13e-3 ext + 1.75e-3 seq + 2.19e-6 ext seq on top.
        (
            1024,
            1024,
            (
                0.10842571 * 1024
                + 4.2098
                + 1.86e-4 * 2048
                + 0.159
                + 1.13e-3 * 1024
                + 1.75e-3 * 2048
                + 2.19e-6 * 1024 * 2048
            )
            / 0.9,
        ),
        # Short prompts: 22 up to 192 tokens, half way to 45.84527264 at 288.
        (100, 0, (22 + 0.32) / 0.9),
        (288, 0, ((22 + 45.84527264) / 2 + 0.32) / 0.9),
        (0, 5000, 0.0),
    ],
)
def test_mistral_7b_on_an_a6000(new: int, context: int, milliseconds: float) -> None:
    assert A6000_MISTRAL_7B.prefill_time_s(new, context) * 1e3 == pytest.approx(milliseconds)


@pytest.mark.parametrize(("new", "context"), [(512, 0), (512, 7680), (8192, 0)])
def test_llama_70b_on_two_h100(new: int, context: int) -> None:
    sequence = new + context
    published = 18.667 + 0.07988 * new + 2.685e-3 * sequence + 7.444e-7 * new * sequence
    assert H100_LLAMA_70B.prefill_time_s(new, context) * 1e3 == pytest.approx(published, rel=1e-4)


def test_decoding_pays_the_shortest_pass_and_the_context_for_each_token() -> None:
    # 200 tokens behind 4,000: the middle one sees 4,100: 22 + 1.86e-4 x 4100 + 0.159 = 22.9216 ms, / 0.9.
    assert A6000_MISTRAL_7B.decode_time_s(200, 4000) == pytest.approx(200 * 0.0229216 / 0.9)
    assert A6000_MISTRAL_7B.decode_time_s(0, 4000) == 0.0
    steps = sum(H100_LLAMA_70B.iteration_time_s([(1, 4000 + token)]) for token in range(200))
    assert H100_LLAMA_70B.decode_time_s(200, 4000) == pytest.approx(steps, rel=1e-4)


def test_an_iteration_pays_its_constant_once() -> None:
    # 512 new tokens and eight decodes behind 1,000 each: 520 new, 512 + 8 x 1001 in attention, one constant.
    mixed = A6000_MISTRAL_7B.iteration_time_s([(512, 0)] + [(1, 1000)] * 8)
    assert mixed * 1e3 == pytest.approx((0.10842571 * 520 + 4.2098 + 1.86e-4 * 8520 + 0.159) / 0.9)
    assert A6000_MISTRAL_7B.iteration_time_s([]) == 0.0


@settings(deadline=None)
@given(model=MODELS, new=TOKENS, context=TOKENS)
def test_an_iteration_with_one_call_is_its_prefill(model: CostModel, new: int, context: int) -> None:
    assert model.iteration_time_s([(new, context)]) == model.prefill_time_s(new, context)


@settings(deadline=None)
@given(model=MODELS, new=TOKENS, context=TOKENS, more_new=TOKENS, more_context=TOKENS)
def test_more_tokens_never_take_less_time(
    model: CostModel, new: int, context: int, more_new: int, more_context: int
) -> None:
    assert model.prefill_time_s(new + more_new, context) >= model.prefill_time_s(new, context)
    assert model.prefill_time_s(new, context + more_context) >= model.prefill_time_s(new, context)
    assert model.decode_time_s(new + more_new, context) >= model.decode_time_s(new, context)
    assert model.decode_time_s(new, context + more_context) >= model.decode_time_s(new, context)


@settings(deadline=None)
@given(model=MODELS, work=st.lists(st.tuples(st.integers(1, 4000), TOKENS), min_size=1, max_size=5))
def test_a_batch_takes_no_less_than_any_of_its_calls(model: CostModel, work: list[tuple[int, int]]) -> None:
    alone = [model.prefill_time_s(new, context) for new, context in work]
    assert model.iteration_time_s(work) >= max(alone) * (1 - 1e-9)


def with_forward(knots: tuple[tuple[int, float], ...], slope_s: float) -> CostModel:
    return CostModel(PiecewiseLinear(knots, slope_s), 0.0, 0.0, 0.0, LongAttention())


@pytest.mark.parametrize(
    ("knots", "slope_s", "tokens"),
    [
        (((1, 11.0),), 1.0, 90),  # 10 + n: n / (10 + n) = 0.9
        (((100, 100.0),), 1.0, 90),  # flat before the knot, then proportional: 0.9 of the way to it
        (((1, 20.0), (100, 120.0)), 1.0, 180),  # 20 + n behind a steeper start
        (((1, 1.0), (50, 10.0), (100, 100.0)), 1.0, 1),  # never far from the asymptote
        (((80, 100.0), (100, 100.0), (120, 200.0), (200, 200.0)), 1.0, 180),  # it dips once more before
    ],
)
def test_the_pivot_is_where_throughput_comes_near_its_asymptote(
    knots: tuple[tuple[int, float], ...], slope_s: float, tokens: int
) -> None:
    model = with_forward(knots, slope_s)
    assert model.pivot() == Pivot(tokens, model.prefill_time_s(tokens))


@given(
    rises=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 100)), min_size=1, max_size=6),
    slope_s=st.integers(1, 50),
)
def test_from_the_pivot_on_and_not_before_throughput_is_near_its_asymptote(
    rises: list[tuple[int, int]], slope_s: int
) -> None:
    tokens, seconds, knots = 0, 0, []
    for more_tokens, more_s in rises:
        tokens, seconds = tokens + more_tokens, seconds + more_s
        knots.append((tokens, float(seconds)))
    model = with_forward(tuple(knots), float(slope_s))
    pivot = model.pivot()
    assert pivot is not None
    shares = [slope_s * size - PIVOT_SHARE * model.forward.at(size) for size in range(1, 2 * (tokens + pivot.tokens))]
    assert all(share >= -1e-3 for share in shares[pivot.tokens - 1 :])
    assert pivot.tokens == 1 or shares[pivot.tokens - 2] < 1e-3


def test_attention_is_in_the_pivots_time_and_not_in_its_size() -> None:
    without = replace(A6000_MISTRAL_7B, context_constant_s=0.0, context_s=0.0, context_floor_s=0.0)
    pivot, bare = A6000_MISTRAL_7B.pivot(), without.pivot()
    assert pivot is not None
    assert bare is not None
    # 22 ms up to 192 tokens: 0.10842571 n = 0.9 x 22 at 182.6.
    assert pivot.tokens == bare.tokens == 183
    assert pivot.time_s == pytest.approx(0.02232 / 0.9)
    assert bare.time_s == pytest.approx(0.022 / 0.9)


def test_a_time_that_does_not_grow_has_no_pivot() -> None:
    assert with_forward(((1, 1.0), (10, 2.0)), 0.0).pivot() is None


def test_lines_between_knots_flat_before_and_sloped_after() -> None:
    line = PiecewiseLinear(((10, 1.0), (20, 3.0), (40, 4.0)), 0.5)
    assert [line.at(tokens) for tokens in (0, 10, 15, 20, 30, 40, 42)] == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0]


@pytest.mark.parametrize(
    ("knots", "slope_s", "message"),
    [
        ((), 0.0, "strictly ascending"),
        (((2, 1.0), (1, 2.0)), 0.0, "strictly ascending"),
        (((1, 1.0), (1, 2.0)), 0.0, "strictly ascending"),
        (((1, 2.0), (2, 1.0)), 0.0, "less time"),
        (((1, -1.0),), 0.0, "less time"),
        (((1, 1.0),), -0.1, "less time"),
    ],
)
def test_coefficients_that_make_no_sense_are_refused(
    knots: tuple[tuple[int, float], ...], slope_s: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PiecewiseLinear(knots, slope_s)


def test_so_are_a_negative_attention_and_no_efficiency() -> None:
    with pytest.raises(ValueError, match="attention"):
        replace(A6000_MISTRAL_7B, context_s=-1e-9)
    with pytest.raises(ValueError, match="efficiency"):
        replace(A6000_MISTRAL_7B, efficiency=0.0)


@given(
    knots=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=5),
    slope=st.integers(0, 2),
    seconds=st.integers(0, 30),
)
def test_the_reach_of_a_time_is_the_most_tokens_that_it_is_enough_for(
    knots: list[tuple[int, int]], slope: int, seconds: int
) -> None:
    tokens, times = (list(accumulate(column)) for column in zip(*knots, strict=True))
    curve = PiecewiseLinear(tuple(zip(tokens, map(float, times), strict=True)), float(slope))
    reach = curve.reach(float(seconds))
    if reach == inf:
        assert curve.at(10_000) <= seconds
        assert slope == 0
    else:
        assert curve.at(int(reach)) <= seconds + 1e-9 or reach == 0
        assert curve.at(int(reach) + 1) > seconds - 1e-9
