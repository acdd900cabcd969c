"""The fit gives back the model that the times came from: exactly from exact times, closely from noisy ones."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.profiles import load_profile
from plait.lab.profiling.profile_fit import MAX_KNOTS, Point, fit_cost_model
from plait.lab.profiling.profile_plan import FULL, QUICK, Effort, Kind, Limits, Trial, chunks, plan
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear

LIMITS = Limits(context_tokens=32_768, budget_tokens=2048, kv_tokens=200_000)
# Between the points measured: beyond them, noise is multiplied.
GRID = [
    *([(1, context)] * batch for batch in (1, 3, 12, 40) for context in (40, 1_000)),
    *([(1, 8_000)] * batch for batch in (1, 3, 10)),
    *([(new, context)] for new in (20, 100, 300, 700, 1_800) for context in (0, 2_000, 12_000)),
    [(500, 4_000), *[(1, 2_000)] * 8],
]


REQUEST_S = 0.002


def points(model: CostModel, effort: Effort = FULL, noise: float = 0.0, seed: int = 0) -> list[Point]:
    """What the plan would measure of an engine that is `model`, behind a server that takes `REQUEST_S`."""
    rng = random.Random(seed)

    def measured(trial: Trial) -> Point:
        call = (trial.new_tokens, trial.context_tokens)
        iterations = chunks(*call, LIMITS.budget_tokens) if trial.batch == 1 else ((call,) * trial.batch,)
        prompt_tokens = 0 if trial.kind is Kind.DECODE else sum(call)
        seconds = sum(map(model.iteration_time_s, iterations)) + (REQUEST_S if prompt_tokens else 0.0)
        seconds *= rng.uniform(1 - noise, 1 + noise)
        return Point(trial.kind, iterations, seconds, prompt_tokens, held_out=trial.kind is Kind.CHUNKED)

    return [measured(trial) for trials in plan(LIMITS, effort).values() for trial in trials]


def worst(model: CostModel, fitted: CostModel, grid: Iterable[list[tuple[int, int]]] = GRID) -> float:
    """The largest relative error of an iteration's time."""
    return max(abs(fitted.iteration_time_s(work) / model.iteration_time_s(work) - 1) for work in grid)


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    """A constant forward pass until it is bound by computation, which sets in at one of the sizes measured."""
    base_s = draw(st.floats(3e-3, 60e-3))
    saturated = draw(st.sampled_from([64, 128, 256, 512]))
    rise = draw(st.floats(0.3, 1.5))  # what follows, against a straight line from the origin
    return CostModel(
        forward=PiecewiseLinear(((1, base_s), (saturated, base_s)), rise * base_s / saturated),
        context_constant_s=0.0,
        context_s=base_s * draw(st.floats(1e-6, 3e-5)),
        context_floor_s=0.0,
        long_attention=LongAttention(
            0, 0.0, base_s * draw(st.floats(0, 5e-5)), base_s / saturated * draw(st.floats(1e-6, 1e-4))
        ),
    )


@settings(max_examples=10)  # a fit takes 150 ms
@given(models())
def test_exact_times_give_the_coefficients_back(model: CostModel) -> None:
    found = fit_cost_model(points(model))
    assert found.request_s == pytest.approx(REQUEST_S, rel=0.1)
    fitted = found.costs
    assert worst(model, fitted) < 0.01
    assert fitted.forward.at(1) == pytest.approx(model.forward.at(1), rel=0.01)
    assert fitted.forward.slope_s == pytest.approx(model.forward.slope_s, rel=0.02)
    assert fitted.context_s == pytest.approx(model.context_s, rel=0.05)
    assert fitted.long_attention.product_s == pytest.approx(model.long_attention.product_s, rel=0.05)


@settings(max_examples=5)  # a fit takes 150 ms
@given(models(), st.integers(0, 10_000), st.sampled_from([FULL, QUICK]))
def test_noisy_times_give_them_back_closely(model: CostModel, seed: int, effort: Effort) -> None:
    """As the median of three noises: of all noises that are drawn, one in some thousand misses the bounds."""
    fits = [fit_cost_model(points(model, effort, noise=0.03, seed=seed + more)).costs for more in range(3)]
    fitted = sorted(fits, key=lambda fit: worst(model, fit))[1]
    assert worst(model, fitted) < 0.1
    assert fitted.forward.at(1) == pytest.approx(model.forward.at(1), rel=0.05)
    # Under noise the slope is traded against attention: what it is wrong by is judged by the time it stands for.
    wrong_s = abs(fitted.forward.slope_s - model.forward.slope_s) * 4096
    assert wrong_s <= 0.15 * model.prefill_time_s(4096)


@settings(max_examples=10)  # a fit takes 150 ms
@given(models(), st.integers(0, 10_000))
def test_whatever_the_noise_a_model_is_monotone_and_small(model: CostModel, seed: int) -> None:
    fitted = fit_cost_model(points(model, QUICK, noise=0.5, seed=seed)).costs
    for curve in {fitted.forward, fitted.prompts}:
        times = [seconds for _, seconds in curve.knots]
        assert times == sorted(times)
        assert len(times) <= MAX_KNOTS
        (first, first_s), (last, last_s) = curve.knots[0], curve.knots[-1]
        assert curve.slope_s * (last - first) >= (last_s - first_s) * (1 - 1e-9), "no free tokens beyond the last"
    long = fitted.long_attention
    assert min(fitted.forward.slope_s, fitted.context_s, long.new_s, long.sequence_s, long.product_s) >= 0


@pytest.mark.parametrize("name", ["a6000-mistral-7b", "a100-mistral-7b", "h100-llama-70b-tp2", "a100-llama-70b-tp2"])
def test_shipped_profiles_are_found_again(name: str) -> None:
    model = load_profile(name).cost_model()
    assert worst(model, fit_cost_model(points(model)).costs) < 0.15
    assert worst(model, fit_cost_model(points(model, QUICK)).costs) < 0.25


GRAPHS = {1: 4.9e-3, 2: 5.0e-3, 4: 5.2e-3, 8: 5.7e-3, 16: 6.7e-3, 32: 8.7e-3, 64: 12e-3}
"""The seconds of decodes by the size of their CUDA graph."""


def test_decodes_step_from_graph_to_graph() -> None:
    sizes = [*GRAPHS]
    steps = [(1, GRAPHS[1]), *((size + 1, GRAPHS[graph]) for size, graph in pairwise(sizes))]
    knots = tuple(sorted({*GRAPHS.items(), *steps}))
    prompts = PiecewiseLinear(((16, 0.012), (512, 0.012), (513, 0.029), (896, 0.029)), 3.2e-5)
    model = CostModel(PiecewiseLinear(knots, 1e-4), 0.0, 3e-8, 0.0, LongAttention(0, 0.0, 0.0, 1e-9), 1.0, (), prompts)
    fitted = fit_cost_model(points(model)).costs
    assert fitted.with_prompts is not None
    for batch in range(1, 65):
        assert fitted.decode_iteration_s(batch, 0) == pytest.approx(model.decode_iteration_s(batch, 0), rel=0.01)
    for size in (20, 512, 513, 800, 1_800):
        assert fitted.prefill_time_s(size) == pytest.approx(model.prefill_time_s(size), rel=0.01)


@settings(max_examples=5)
@given(models(), st.integers(0, 10_000), st.sampled_from([FULL, QUICK]), st.floats(0.5, 5.0))
def test_prompts_have_a_curve_of_their_own_if_they_take_longer(
    model: CostModel, seed: int, effort: Effort, longer: float
) -> None:
    assert fit_cost_model(points(model, effort, 0.03, seed)).costs.with_prompts is None
    added_s = longer * model.forward.at(1)
    prompts = PiecewiseLinear(
        tuple((tokens, seconds + added_s) for tokens, seconds in model.forward.knots), model.forward.slope_s
    )
    found = fit_cost_model(points(replace(model, with_prompts=prompts), effort, 0.03, seed))
    assert found.costs.with_prompts is not None
    assert found.costs.forward.at(1) == pytest.approx(model.forward.at(1), rel=0.05)
    assert found.costs.prompts.at(64) == pytest.approx(prompts.at(64), rel=0.08)


def test_a_threshold_is_found_where_there_is_one() -> None:
    with_threshold = load_profile("a6000-mistral-7b").cost_model()  # 2^20
    assert 1 << 18 < fit_cost_model(points(with_threshold)).costs.long_attention.threshold <= 1 << 20
    without = load_profile("h100-llama-70b-tp2").cost_model()
    assert fit_cost_model(points(without, noise=0.03)).costs.long_attention.threshold == 0


def test_chunked_prompts_check_the_fit_without_shaping_it() -> None:
    model = load_profile("h100-llama-70b-tp2").cost_model()
    measured = points(model)
    held_out = [point for point in measured if point.held_out]
    assert held_out
    fitted = fit_cost_model(measured)
    for point in held_out:
        assert fitted.residual(point).relative_error == pytest.approx(0, abs=0.02)
    slower = [Point(p.kind, p.iterations, 2 * p.seconds, p.prompt_tokens, p.held_out) for p in held_out]
    again = fit_cost_model([*(point for point in measured if not point.held_out), *slower])
    assert again == fitted
    assert again.residual(slower[0]).relative_error == pytest.approx(-0.5, abs=0.02)


def test_too_few_sizes_are_refused() -> None:
    measured = [Point("decode", (((1, 30),) * batch,), 0.01) for batch in (1, 2)]
    with pytest.raises(ValueError, match="more than 2 sizes of iterations, not 2"):
        fit_cost_model(measured)
