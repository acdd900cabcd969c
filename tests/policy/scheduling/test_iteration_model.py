"""How long iterations take: a profile, given or usual, and the three numbers that are learned beside it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.profiles import load_profile, shipped_profiles
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.iteration_model import MIN_ITERATIONS, IterationModel, scaled
from plait.policy.scheduling.plan import IterationWork
from tests.policy.scheduling.fake_engine import COSTS

CHUNKS = (100, 300, 500, 900, 1500, 2048)
H200 = load_profile("h200-llama-8b").cost_model()


def observed(model: IterationModel, engine: CostModel, count: int = 64, noise: float = 0.0, seed: int = 0) -> CostModel:
    """What a model knows after so many iterations of an engine with a prompt's chunk, and as many without.

    Each size of chunk comes about as often: where short ones hardly come, a step cannot be seen.
    """
    rng = random.Random(seed)
    chunks = [CHUNKS[number % len(CHUNKS)] for number in range(count)]
    rng.shuffle(chunks)
    for chunk in chunks:
        decodes = rng.randrange(1, 20)
        for new in ([1] * decodes, [chunk, *[1] * decodes]):
            context = [rng.randrange(4_000) for _ in new]
            took_s = engine.iteration_time_s(zip(new, context, strict=True)) * (1 + noise * rng.uniform(-1, 1))
            model.on_iteration(took_s, IterationWork.of(new, context))
    assert model.costs is not None
    return model.costs


def test_a_few_iterations_with_prompts_make_an_engine_known() -> None:
    model = IterationModel()
    for _ in range(100):
        model.on_iteration(0.02, IterationWork.of([1], [0]))
    assert model.pivot is None, "decodes do not tell how long prompts take"
    for _ in range(MIN_ITERATIONS):
        model.on_iteration(0.05, IterationWork.of([500], [0]))
    assert model.costs is not None
    assert model.costs.iteration_time_s([(1, 0)]) == pytest.approx(0.02)
    assert model.costs.prefill_time_s(500) == pytest.approx(0.05, rel=0.01)


def test_a_given_model_holds_until_it_is_seen_to_be_wrong() -> None:
    model = IterationModel()
    model.expect(COSTS)
    assert model.costs is COSTS
    model.on_iteration(1.0, IterationWork.of([100], [0]))
    assert model.costs is COSTS, "one iteration shows nothing"
    assert observed(model, COSTS).prefill_time_s(700, 3_000) == pytest.approx(COSTS.prefill_time_s(700, 3_000))


@given(
    decodes=st.floats(0.4, 2.5),
    prompts_over_decodes=st.floats(0.6, 1.7),
    step_s=st.sampled_from([0.0, 0.015, 0.029]),
    noise=st.sampled_from([0.0, 0.05]),
    is_told=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_engine_is_learned_however_wrong_its_profile_is(
    *, decodes: float, prompts_over_decodes: float, step_s: float, noise: float, is_told: bool, seed: int
) -> None:
    engine = scaled(H200, decodes, decodes * prompts_over_decodes, step_s)
    model = IterationModel()
    if is_told:
        model.expect(H200)
    found = observed(model, engine, noise=noise, seed=seed)
    shows = engine.prefill_time_s(CHUNKS[-1]) > 1.5 * step_s
    within = 0.25 if shows else 0.35  # chunks that all last about as long as the step say little of how size counts
    for work in ([(1, 500)] * 8, [(200, 0), (1, 500)], [(2048, 2_000)], [(1200, 0), (1, 100)]):
        assert found.iteration_time_s(work) == pytest.approx(engine.iteration_time_s(work), rel=within)


@pytest.mark.parametrize("name", shipped_profiles())
def test_the_usual_proportions_are_those_of_other_engines_too(name: str) -> None:
    """Without a profile, times are known to three tenths. Most of it is attention, which differs between models."""
    engine = load_profile(name).cost_model()
    found = observed(IterationModel(), engine)
    for work in ([(1, 500)] * 8, [(500, 0)], [(1500, 1_000), (1, 500)]):
        assert found.iteration_time_s(work) == pytest.approx(engine.iteration_time_s(work), rel=0.3)


def test_iterations_that_all_last_as_long_do_not_change_what_size_counts() -> None:
    """Chunks under a step tell the step, not how fast the engine is beyond it."""
    model = IterationModel()
    model.expect(H200)
    for number in range(64):
        model.on_iteration(0.029, IterationWork.of([100 + number], [0]))
    assert model.costs is not None
    assert model.costs.prefill_time_s(150) == pytest.approx(0.029)
    assert model.costs.prefill_time_s(2048) == pytest.approx(H200.prefill_time_s(2048), rel=0.01)


def test_iterations_that_a_limit_makes_alike_are_no_step() -> None:
    """Chunks that end with the same deadline, after more and more context."""
    model = IterationModel()
    model.expect(H200)
    for number in range(64):
        chunk = (500 - 3 * number, 200 * number)
        model.on_iteration(H200.prefill_time_s(*chunk), IterationWork.of(*[[one] for one in chunk]))
    assert model.costs is not None
    assert model.costs.step_s == 0.0
    assert model.costs.prefill_time_s(2048) == pytest.approx(H200.prefill_time_s(2048))


def test_a_step_that_was_told_is_not_needed_to_be_there() -> None:
    model = IterationModel()
    model.expect(replace(H200, step_s=0.029))
    assert observed(model, H200).step_s == 0.0


@pytest.mark.parametrize("slow", [[2000], [20], [1]], ids=["large", "small", "decode"])
def test_one_iteration_that_waits_for_something_shows_nothing(slow: list[int]) -> None:
    """The first of an engine may compile, or record a graph."""
    model = IterationModel()
    model.expect(H200)
    model.on_iteration(1.0, IterationWork.of(slow, [0]))
    for number in range(MIN_ITERATIONS):
        model.on_iteration(H200.prefill_time_s(200 + number), IterationWork.of([200 + number], [0]))
        assert model.costs is not None
        assert model.costs.prefill_time_s(1000) == pytest.approx(H200.prefill_time_s(1000), rel=0.01)
        assert model.costs.decode_iteration_s(8, 0) == pytest.approx(H200.decode_iteration_s(8, 0), rel=0.01)


def test_what_has_no_time_shows_nothing() -> None:
    """Empty batches of ranks without work, and iterations whose durations are not known."""
    model = IterationModel()
    model.expect(H200)
    for _ in range(2 * MIN_ITERATIONS):
        model.on_iteration(0.0, IterationWork.of([1], [100]))
        model.on_iteration(0.01, IterationWork())
    assert model.costs is H200


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_nine_of_ten_iterations_stay_within_the_jitter(noise: float) -> None:
    model = IterationModel()
    model.expect(H200)
    observed(model, H200, noise=noise)
    assert 0.6 * noise - 1e-9 <= model.jitter <= 1.2 * noise + 1e-9
