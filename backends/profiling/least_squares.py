"""Least squares with coefficients of at least 0: the active-set method of Lawson and Hanson, on the normal equations.

It is for a few dozen rows and columns, which do not justify a dependency on a linear algebra package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum, sqrt
from operator import mul

TOLERANCE = 1e-10
"""A gradient or pivot below this share of the columns' unit length counts as rounding error."""

STEPS_PER_COLUMN = 10
"""Limits the steps if rounding makes columns indistinguishable. Otherwise far fewer are needed."""


def non_negative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """The x >= 0 with the least sum of (row . x - target)^2.

    A column that depends on the others or has no effect gets 0. All rows have the same length.
    """
    columns = [list(column) for column in zip(*rows, strict=True)]
    lengths = [sqrt(_dot(column, column)) or 1.0 for column in columns]
    columns = [[value / length for value in column] for column, length in zip(columns, lengths, strict=True)]
    gram = [[_dot(left, right) for right in columns] for left in columns]
    goal = [_dot(column, targets) for column in columns]
    solution = _active_set(gram, goal, TOLERANCE * sqrt(_dot(targets, targets)))
    return [value / length for value, length in zip(solution, lengths, strict=True)]


def _active_set(gram: list[list[float]], goal: list[float], tolerance: float) -> list[float]:
    """Free the coefficients one by one, the most helpful first. Coefficients that would become negative stay at 0."""
    solution = [0.0] * len(goal)
    free: list[int] = []
    useless: set[int] = set()  # freed in vain since the last progress; else rounding could free them for ever
    for _ in range(STEPS_PER_COLUMN * len(goal)):
        gradient = [wanted - _dot(row, solution) for wanted, row in zip(goal, gram, strict=True)]
        held = [j for j in range(len(goal)) if j not in free and j not in useless and gradient[j] > tolerance]
        if not held:
            return solution
        entering = max(held, key=gradient.__getitem__)
        trial = _solve(gram, goal, [*free, entering])
        if trial is None or trial[-1] <= 0:
            useless.add(entering)
            continue
        free.append(entering)
        useless.clear()
        while trial is not None and min(trial) <= 0:
            _step_to_bound(solution, free, trial)
            trial = _solve(gram, goal, free)
        if trial is None:  # only by rounding: a subset of independent columns is independent
            break
        for j, value in zip(free, trial, strict=True):
            solution[j] = value
    return solution  # as good as rounding allows


def _step_to_bound(solution: list[float], free: list[int], trial: Sequence[float]) -> None:
    """Move towards `trial` until a free coefficient reaches 0, and hold it at 0."""
    shares = {
        j: solution[j] / ((solution[j] - value) or 1.0) for j, value in zip(free, trial, strict=True) if value <= 0
    }
    share = min(shares.values())
    bound = [j for j, own in shares.items() if own <= share]
    for j, value in zip(free, trial, strict=True):
        solution[j] = max(0.0, solution[j] + share * (value - solution[j]))
    for j in bound:
        solution[j] = 0.0
        free.remove(j)


def _solve(gram: list[list[float]], goal: list[float], free: Sequence[int]) -> list[float] | None:
    """Solve for the free coefficients by Cholesky's decomposition; None if their columns are not independent."""
    lower: list[list[float]] = []
    forward: list[float] = []
    for i, j in enumerate(free):
        row: list[float] = []
        for k in range(i):
            row.append((gram[j][free[k]] - _dot(row, lower[k])) / lower[k][k])
        pivot = gram[j][j] - _dot(row, row)
        if pivot <= TOLERANCE:
            return None
        row.append(sqrt(pivot))
        lower.append(row)
        forward.append((goal[j] - _dot(row, forward)) / row[i])
    result = [0.0] * len(free)
    for i in reversed(range(len(free))):
        behind = sum(lower[k][i] * result[k] for k in range(i + 1, len(free)))
        result[i] = (forward[i] - behind) / lower[i][i]
    return result


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    """The dot product, over the length of the shorter."""
    return fsum(map(mul, left, right))
