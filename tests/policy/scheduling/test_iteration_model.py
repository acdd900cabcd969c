"""How long iterations take: the model that is given, or the one that is fitted."""

from __future__ import annotations

import pytest

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.plan import IterationWork
from tests.policy.scheduling.fake_engine import COSTS


def test_an_iteration_time_model_is_fitted_where_none_is_given() -> None:
    model = IterationModel()
    for number in range(20):
        tokens = 100 * (number % 5) + 1
        model.on_iteration(0.01 + 1e-4 * tokens, IterationWork.of([tokens], [0]))
    assert model.costs is not None
    assert model.costs.prefill_time_s(700) == pytest.approx(0.08)


def test_iterations_that_are_all_alike_say_nothing_about_others() -> None:
    model = IterationModel()
    for _ in range(100):
        model.on_iteration(0.0201, IterationWork.of([1], [0]))
    assert model.costs is None


def test_a_given_model_stays() -> None:
    model = IterationModel()
    model.expect(COSTS)
    for tokens in range(1, 50):
        model.on_iteration(1.0, IterationWork.of([tokens], [0]))
    assert model.costs is COSTS


def test_the_fit_tells_apart_what_an_iteration_computes_reads_and_attends_to() -> None:
    costs = CostModel(PiecewiseLinear(((0, 0.01),), 1e-4), 0.0, 1e-7, 0.0, LongAttention(product_s=1e-9))
    model = IterationModel()
    for number in range(60):
        work = [(100 + 37 * number % 900, 500 * (number % 7)), *[(1, 300 * (number % 11))] * (number % 5)]
        model.on_iteration(costs.iteration_time_s(work), IterationWork.of(*zip(*work, strict=True)))
    assert model.costs is not None
    for work in ([(64, 0)], [(500, 8000), (1, 100)], [(1, 4000)] * 30):
        assert model.costs.iteration_time_s(work) == pytest.approx(costs.iteration_time_s(work), rel=1e-3)


def test_small_iterations_take_as_long_as_decodes_alone() -> None:
    model = IterationModel()
    for number in range(40):
        model.on_iteration(0.03, IterationWork.of([1] * 4, [0] * 4))
        tokens = 400 + 100 * (number % 8)
        model.on_iteration(0.01 + 1e-4 * tokens, IterationWork.of([tokens], [0]))
    assert model.costs is not None
    assert model.costs.iteration_time_s([(1, 0)] * 4) == pytest.approx(0.03)
    assert model.costs.prefill_time_s(100) == pytest.approx(0.03, rel=1e-3)
    assert model.costs.prefill_time_s(600) == pytest.approx(0.07, rel=1e-3)
