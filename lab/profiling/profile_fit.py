"""Fits the cost model to measured iteration times: takes points, and gives coefficients and each point's error.

The model is linear in coefficients of at least 0. Each curve of the forward pass (decodes alone and iterations with
prompts may differ) has one for its time at the first knot, one for the rise from each knot to the next, and one for the
slope after the last. Attention has one for each term. So a single least squares of relative errors fits all
coefficients together, and the times rise with the tokens. Only the knots and the threshold of long attention have to be
searched. A step is two knots at neighbouring sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
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
    try:
        solution, _ = nnls(scaled, targets, maxiter=STEPS_PER_COLUMN * len(lengths))
    except RuntimeError as error:
        raise ValueError("the measured times fit no profile: stop what else runs here, and measure again") from error
    return [float(value) / length for value, length in zip(solution, lengths, strict=True)]


Iteration = tuple[tuple[int, int], ...]
"""One forward pass: `(new tokens, context tokens)` of each call in it."""

Curves = Sequence[Sequence[int]]
"""The knots of the one curve, or those of decodes alone and those of iterations with prompts."""

MAX_KNOTS = 12
TAIL_SIZES = 2
"""At least this many sizes of iterations (new tokens) must determine the slope after the last knot.

Decodes alone have a knot at the largest batch instead: the largest two may have the same CUDA graph.
"""

NOISE = 1e-3
"""Measurements have at least this relative error, so a smaller error of the fit is no improvement."""

KNOT_GAIN, THRESHOLD_GAIN, CURVE_GAIN = 0.2, 0.75, 0.5
"""The share of the squared error that a further knot, a threshold, or a second curve must remove. By chance alone, the
best of twenty candidates removes about a tenth at sixty points.
"""

CURVE_NOISE = 0.02
"""Relative errors below this do not ask for a second curve."""


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
    decodes, prompts = (
        {_new_tokens(work) for point in points for work in point.iterations if _has_prompt(work) is wanted}
        for wanted in (False, True)
    )
    sizes = sorted(decodes | prompts)
    if len(sizes) <= TAIL_SIZES:
        raise ValueError(f"a fit needs more than {TAIL_SIZES} sizes of iterations, not {len(sizes)}")
    one = _best_model(points, [sizes[:-TAIL_SIZES]])
    if len(decodes) < 2 or len(prompts) <= TAIL_SIZES:
        return one
    two = _best_model(points, [sorted(decodes), sorted(prompts)[:-TAIL_SIZES]])
    left = _squared_error(two, points, CURVE_NOISE) / _squared_error(one, points, CURVE_NOISE)
    return two if left < 1 - CURVE_GAIN else one


def _best_model(points: Sequence[Point], curves: Curves) -> FittedModel:
    """The model with the best threshold and the most helpful of these knots."""
    threshold = _threshold(points, curves)
    for place in range(len(curves)):
        curves = [*curves[:place], _knots(points, curves, place, threshold), *curves[place + 1 :]]
    return _model(points, curves, threshold)


def _threshold(points: Sequence[Point], curves: Curves) -> int:
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
    errors = {power: _squared_error(_model(points, curves, power), points) for power in (0, *powers)}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < (1 - THRESHOLD_GAIN) * errors[0] else 0


def _knots(points: Sequence[Point], curves: Curves, place: int, threshold: int) -> list[int]:
    """A curve's first size, then its most helpful sizes or steps one by one, until the gain of a knot is too small."""
    candidates = curves[place]
    decodes_alone = place < len(curves) - 1
    judged = [point for point in points if len(curves) == 1 or _has_prompt(point.iterations[0]) is not decodes_alone]

    def error_with(knots: list[int]) -> float:
        return _squared_error(_model(points, [*curves[:place], knots, *curves[place + 1 :]], threshold), judged)

    knots = [candidates[0], candidates[-1]] if decodes_alone else [candidates[0]]
    error = error_with(knots)
    further = [*((size,) for size in candidates), *pairwise(candidates)]
    while len(knots) < min(MAX_KNOTS, len(candidates)):
        longer = [sorted({*knots, *sizes}) for sizes in further if not set(sizes) <= set(knots)]
        left, trial = min(((error_with(trial) / error) ** (1 / (len(trial) - len(knots))), trial) for trial in longer)
        if left > 1 - KNOT_GAIN:
            break
        knots, error = trial, error_with(trial)
    return knots


def _squared_error(model: FittedModel, points: Sequence[Point], noise: float = NOISE) -> float:
    return sum(model.residual(point).relative_error ** 2 + noise**2 for point in points)


def _model(points: Sequence[Point], curves: Curves, threshold: int) -> FittedModel:
    rows = [[term / point.seconds for term in _terms(point, curves, threshold)] for point in points]
    solution = iter(non_negative_least_squares(rows, [1.0] * len(points)))
    forward, *with_prompts = [_curve(knots, list(islice(solution, len(knots) + 1))) for knots in curves]
    context_s, sequence_s, product_s, request_s, *more = solution
    new_s, prompt_token_s = more or (0.0, 0.0)
    costs = CostModel(
        forward=forward,
        context_constant_s=0.0,
        context_s=context_s,
        context_floor_s=0.0,
        long_attention=LongAttention(threshold, new_s, sequence_s, product_s),
        with_prompts=with_prompts[0] if with_prompts else None,
    )
    return FittedModel(costs, request_s, prompt_token_s)


def _curve(knots: Sequence[int], coefficients: Sequence[float]) -> PiecewiseLinear:
    """A curve by its rise to each knot, and the slope after the last beyond the mean slope."""
    *rises, slope_s = coefficients
    if len(knots) > 1:
        slope_s += sum(rises[1:]) / (knots[-1] - knots[0])
    return PiecewiseLinear(tuple(zip(knots, accumulate(rises), strict=True)), slope_s)


def _terms(point: Point, curves: Curves, threshold: int) -> list[float]:
    """The factor of each coefficient at a point, summed over the point's iterations."""
    each = [list(_iteration_terms(iteration, curves, threshold)) for iteration in point.iterations]
    terms = [sum(column) for column in zip(*each, strict=True)]
    terms.append(1.0 if point.prompt_tokens else 0.0)
    if threshold:
        long = [call for iteration in point.iterations for call in _long(iteration, threshold)]
        terms += [sum(new for new, _ in long), point.prompt_tokens]
    return terms


def _iteration_terms(iteration: Iteration, curves: Curves, threshold: int) -> Iterator[float]:
    """The factors in one iteration, as in `CostModel.iteration_time_s`."""
    taken = len(curves) - 1 if _has_prompt(iteration) else 0
    for place, knots in enumerate(curves):
        yield from _curve_terms(_new_tokens(iteration), knots) if place == taken else [0.0] * (len(knots) + 1)
    yield sum(new + context for new, context in iteration)
    long = _long(iteration, threshold)
    yield sum(new + context for new, context in long)
    yield sum(new * (new + context) for new, context in long)


def _curve_terms(new_tokens: int, knots: Sequence[int]) -> Iterator[float]:
    behind = max(0, new_tokens - knots[-1])
    yield 1.0
    for left, right in pairwise(knots):
        # After the last knot, time rises at least as fast as between the first and the last: batching gets no cheaper.
        yield min(1.0, max(0.0, (new_tokens - left) / (right - left))) + behind / (knots[-1] - knots[0])
    yield behind


def _has_prompt(iteration: Iteration) -> bool:
    return any(new > 1 for new, _ in iteration)


def _long(iteration: Iteration, threshold: int) -> list[tuple[int, int]]:
    return [(new, context) for new, context in iteration if new > 1 and new * (new + context) > threshold]


def _new_tokens(iteration: Iteration) -> int:
    return sum(new for new, _ in iteration)
