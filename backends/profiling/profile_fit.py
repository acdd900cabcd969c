"""Fits the cost model to measured iteration times: takes points, and gives coefficients and each point's error.

The model is linear in coefficients of at least 0. The forward pass has one for its time at the first knot, one for the
rise from each knot to the next, and one for the slope after the last. Attention has one for each term. So a single
least squares of relative errors fits all coefficients together, and the times rise with the tokens. Only the knots and
the threshold of long attention have to be searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum, sqrt

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear

STEPS_PER_COLUMN = 30
"""Limits the solver's steps if rounding makes columns indistinguishable. Usually far fewer are needed."""


def non_negative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """The x >= 0 with the least sum of (row . x - target)^2. All rows have the same length.

    Columns are scaled to the same length, as coefficients differ by many orders of magnitude. A column of zeros gets
    x = 0. Needs scipy, which the extra `profile` brings.
    """
    from scipy.optimize import nnls  # noqa: PLC0415 - `plait completion` imports this module too

    lengths = [sqrt(fsum(value * value for value in column)) or 1.0 for column in zip(*rows, strict=True)]
    scaled = [[value / length for value, length in zip(row, lengths, strict=True)] for row in rows]
    solution, _ = nnls(scaled, targets, maxiter=STEPS_PER_COLUMN * len(lengths))
    return [float(value) / length for value, length in zip(solution, lengths, strict=True)]


Iteration = tuple[tuple[int, int], ...]
"""One forward pass: `(new tokens, context tokens)` of each call in it."""

MAX_KNOTS = 8
TAIL_SIZES = 2
"""At least this many sizes of iterations (new tokens) must determine the slope after the last knot."""

NOISE = 1e-3
"""Measurements have at least this relative error, so a smaller error of the fit is no improvement."""

KNOT_GAIN, THRESHOLD_GAIN = 0.2, 0.75
"""The share of the squared error that a further knot, or a threshold, must remove. By chance alone, the best of twenty
candidates removes about a tenth at sixty points.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured time: the `kind` of measurement, the iterations that the engine computed, and the seconds.

    `prompt_tokens` is the prompt's length for a TTFT, and 0 for a time between tokens. A point that is `held_out`
    checks the model and is not fitted.
    """

    kind: str
    iterations: tuple[Iteration, ...]
    seconds: float
    prompt_tokens: int = 0
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class Residual:
    """A point, and the model's prediction."""

    point: Point
    predicted_s: float

    @property
    def relative_error(self) -> float:
        """Positive if the model predicts too long a time."""
        return self.predicted_s / self.point.seconds - 1


@dataclass(frozen=True, slots=True)
class FittedModel:
    """The cost model, and a request's time outside iterations: a constant, and a term for each prompt token.

    This time (HTTP, parsing, hashing, copying) is a part of a TTFT, but of no iteration.
    """

    costs: CostModel
    request_s: float = 0.0
    prompt_token_s: float = 0.0

    def residual(self, point: Point) -> Residual:
        """The prediction for a point, held out or not."""
        seconds = sum(map(self.costs.iteration_time_s, point.iterations))
        if point.prompt_tokens:
            seconds += self.request_s + self.prompt_token_s * point.prompt_tokens
        return Residual(point, seconds)


def fit_cost_model(points: Sequence[Point]) -> FittedModel:
    """The model with the least squared relative error over the points that are not held out.

    Points with prompts as small as decode batches are needed to separate a request's own time from its iteration's.
    Terms that measurements cannot separate share a coefficient: attention's constant and floor are in the first knot's
    time, and without a threshold, `long_attention.new_s` is in the slope and `prompt_token_s` in the term for the
    sequence length. Raises ValueError for too few points.
    """
    points = [point for point in points if not point.held_out]
    sizes = sorted({_new_tokens(iteration) for point in points for iteration in point.iterations})
    if len(sizes) <= TAIL_SIZES:
        raise ValueError(f"a fit needs more than {TAIL_SIZES} sizes of iterations, not {len(sizes)}")
    candidates = sizes[:-TAIL_SIZES]
    threshold = _threshold(points, candidates)
    return _model(points, _knots(points, candidates, threshold), threshold)


def _threshold(points: Sequence[Point], knots: Sequence[int]) -> int:
    """The threshold of long attention, in new tokens times sequence tokens: 0, or a power of two that fits far better.

    Published regressions have 2^20.
    """
    products = {
        new * (new + context)
        for point in points
        for iteration in point.iterations
        for new, context in iteration
        if new > 1
    }
    powers = [1 << bits for bits in range(10, 32) if min(products, default=0) <= 1 << bits < max(products, default=0)]
    without = _squared_error(points, knots, 0)
    best, threshold = min(((_squared_error(points, knots, power), power) for power in powers), default=(without, 0))
    return threshold if best < (1 - THRESHOLD_GAIN) * without else 0


def _knots(points: Sequence[Point], candidates: Sequence[int], threshold: int) -> list[int]:
    """The first size, then the most helpful sizes one by one, until the gain is too small."""
    knots = [candidates[0]]
    error = _squared_error(points, knots, threshold)
    while len(knots) < min(MAX_KNOTS, len(candidates)):
        longer = [sorted([*knots, size]) for size in candidates if size not in knots]
        best, with_best = min((_squared_error(points, trial, threshold), trial) for trial in longer)
        if best > (1 - KNOT_GAIN) * error:
            break
        error, knots = best, with_best
    return knots


def _squared_error(points: Sequence[Point], knots: Sequence[int], threshold: int) -> float:
    model = _model(points, knots, threshold)
    return sum(model.residual(point).relative_error ** 2 + NOISE**2 for point in points)


def _model(points: Sequence[Point], knots: Sequence[int], threshold: int) -> FittedModel:
    rows = [[term / point.seconds for term in _terms(point, knots, threshold)] for point in points]
    solution = non_negative_least_squares(rows, [1.0] * len(points))
    rises, (slope_s, context_s, sequence_s, product_s, request_s, *more) = (
        solution[: len(knots)],
        solution[len(knots) :],
    )
    new_s, prompt_token_s = more or (0.0, 0.0)
    if len(knots) > 1:
        slope_s += sum(rises[1:]) / (knots[-1] - knots[0])
    costs = CostModel(
        forward=PiecewiseLinear(tuple(zip(knots, accumulate(rises), strict=True)), slope_s),
        context_constant_s=0.0,
        context_s=context_s,
        context_floor_s=0.0,
        long_attention=LongAttention(threshold, new_s, sequence_s, product_s),
    )
    return FittedModel(costs, request_s, prompt_token_s)


def _terms(point: Point, knots: Sequence[int], threshold: int) -> list[float]:
    """The factor of each coefficient at a point, summed over the point's iterations."""
    each = [list(_iteration_terms(iteration, knots, threshold)) for iteration in point.iterations]
    terms = [sum(column) for column in zip(*each, strict=True)]
    terms.append(1.0 if point.prompt_tokens else 0.0)
    if threshold:
        long = [call for iteration in point.iterations for call in _long(iteration, threshold)]
        terms += [sum(new for new, _ in long), point.prompt_tokens]
    return terms


def _iteration_terms(iteration: Iteration, knots: Sequence[int], threshold: int) -> Iterator[float]:
    """The factors in one iteration, as in `CostModel.iteration_time_s`."""
    new_total = _new_tokens(iteration)
    behind = max(0, new_total - knots[-1])
    yield 1.0
    for left, right in pairwise(knots):
        # After the last knot, time rises at least as fast as between the first and the last: batching gets no cheaper.
        yield min(1.0, max(0.0, (new_total - left) / (right - left))) + behind / (knots[-1] - knots[0])
    yield behind
    yield sum(new + context for new, context in iteration)
    long = _long(iteration, threshold)
    yield sum(new + context for new, context in long)
    yield sum(new * (new + context) for new, context in long)


def _long(iteration: Iteration, threshold: int) -> list[tuple[int, int]]:
    return [(new, context) for new, context in iteration if new > 1 and new * (new + context) > threshold]


def _new_tokens(iteration: Iteration) -> int:
    return sum(new for new, _ in iteration)
