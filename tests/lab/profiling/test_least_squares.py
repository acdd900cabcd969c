"""Non-negative least squares against trying every set of columns."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.lab.profiling.profile_fit import non_negative_least_squares

VALUES = st.integers(-8, 8).map(float)


def squared_error(rows: list[list[float]], targets: list[float], x: list[float]) -> float:
    errors = [sum(a * b for a, b in zip(row, x, strict=True)) - t for row, t in zip(rows, targets, strict=True)]
    return sum(error * error for error in errors)


def determinant(matrix: list[list[float]]) -> float:
    if not matrix:
        return 1.0
    minors = ([row[:j] + row[j + 1 :] for row in matrix[1:]] for j in range(len(matrix)))
    return sum((1 - 2 * (j % 2)) * matrix[0][j] * determinant(minor) for j, minor in enumerate(minors))


def best_of_all_sets(rows: list[list[float]], targets: list[float]) -> float:
    """The least error over every set of columns whose own least squares (by Cramer's rule) has no negative part."""
    count = len(rows[0])
    errors = [squared_error(rows, targets, [0.0] * count)]
    for size in range(1, count + 1):
        for columns in combinations(range(count), size):
            gram = [[sum(row[i] * row[j] for row in rows) for j in columns] for i in columns]
            goal = [sum(row[i] * t for row, t in zip(rows, targets, strict=True)) for i in columns]
            whole = determinant(gram)
            if whole < 0.5:  # integers: dependent columns
                continue
            x = [0.0] * count
            for place, column in enumerate(columns):
                replaced = [[*row[:place], g, *row[place + 1 :]] for row, g in zip(gram, goal, strict=True)]
                x[column] = determinant(replaced) / whole
            if min(x) >= 0:
                errors.append(squared_error(rows, targets, x))
    return min(errors)


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_nothing_non_negative_is_better(data: st.DataObject, columns: int, count: int) -> None:
    rows = data.draw(st.lists(st.lists(VALUES, min_size=columns, max_size=columns), min_size=count, max_size=count))
    targets = data.draw(st.lists(VALUES, min_size=count, max_size=count))
    x = non_negative_least_squares(rows, targets)
    assert min(x) >= 0
    assert squared_error(rows, targets, x) <= best_of_all_sets(rows, targets) + 1e-6


def test_an_exact_solution_is_found_over_many_orders_of_magnitude() -> None:
    rows = [[1.0, n, n * n, 1e-6 * (n % 3)] for n in (1.0, 10.0, 100.0, 1_000.0, 5_000.0, 20_000.0)]
    wanted = [20.0, 0.1, 1e-6, 4e5]
    targets = [sum(a * b for a, b in zip(row, wanted, strict=True)) for row in rows]
    assert non_negative_least_squares(rows, targets) == pytest.approx(wanted, rel=1e-4)


def test_what_would_be_negative_is_zero() -> None:
    assert non_negative_least_squares([[1.0, 0.0], [0.0, 1.0]], [-1.0, 2.0]) == pytest.approx([0.0, 2.0])


def test_columns_that_say_the_same_or_nothing() -> None:
    x = non_negative_least_squares([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]], [3.0, 6.0])
    assert sum(x) == pytest.approx(3.0)
    assert x[2] == 0.0


@given(st.randoms(use_true_random=False), st.integers(3, 12))
def test_columns_that_nearly_say_the_same(rng: random.Random, count: int) -> None:
    rows = []
    for n in range(1, 2 * count):
        base = [min(1.0, n / (knot + 1)) + 1e-9 * rng.random() for knot in range(count)]
        rows.append([*base, *(value * (1 + 1e-7 * rng.random()) for value in base)])
    targets = [rng.uniform(0.5, 1.5) for _ in rows]
    x = non_negative_least_squares(rows, targets)
    assert min(x) >= 0
    assert squared_error(rows, targets, x) <= squared_error(rows, targets, [0.0] * 2 * count)


def test_times_without_a_solution_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr("scipy.optimize.nnls", never)
    with pytest.raises(ValueError, match="stop what else runs here, and measure again"):
        non_negative_least_squares([[1.0]], [1.0])
