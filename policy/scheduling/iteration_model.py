"""A model of how long an engine's iterations take: given, or fitted to the observed iterations."""

from __future__ import annotations

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear, Pivot
from plait.policy.scheduling.plan import IterationWork

FIT_DECAY = 1 - 1 / 256
"""Ours: each new iteration multiplies the weights of the older ones by this. The memory is 256 iterations."""

MIN_ITERATIONS = 8
"""Ours: a model is fitted to at least this many iterations with prompts."""


class IterationModel:
    """The engine's cost model and its pivot, once they are known. A given model is never fitted again."""

    def __init__(self) -> None:
        self._fit = _Fit()
        self._given = False
        self._costs: CostModel | None = None
        self._pivot: Pivot | None = None
        self._solved = True
        """Whether costs and pivot are up to date. The fit is solved only when a plan needs it."""

    @property
    def costs(self) -> CostModel | None:
        if not self._solved:
            self._costs = self._fit.costs()
            self._pivot = self._costs.pivot() if self._costs else None
            self._solved = True
        return self._costs

    @property
    def pivot(self) -> Pivot | None:
        """The pivot forward size: S_pf tokens in T_pf seconds. None while it is not known."""
        return self._pivot if self.costs else None

    def expect(self, costs: CostModel) -> None:
        """Use this model instead of a fitted one."""
        self._costs, self._given, self._pivot, self._solved = costs, True, costs.pivot(), True

    def on_iteration(self, duration_s: float, work: IterationWork) -> None:
        if not self._given:
            self._fit.add(work, duration_s)
            self._solved = False


TERMS = ((0, 1, 2, 3), (0, 1, 3), (0, 1, 2), (0, 1))
"""Models to try in this order, as the indices of their terms (see `_Fit`). A negative coefficient rules a model out,
because more work cannot take less time.
"""


class _Fit:
    """Iteration time as a constant plus three linear terms: new tokens, sequence tokens, and their product in prompts.

    The fit is least squares over all iterations with prompts; older ones weigh less. A small iteration takes as long
    as an iteration of decodes alone, because every iteration reads the model's weights.
    """

    def __init__(self) -> None:
        self._sums = [[0.0] * 5 for _ in range(4)]
        """The normal equations: their matrix, with the right side as the last column."""
        self._decodes = (0.0, 0.0, 0.0)
        """Iterations of decodes alone: their number, and the sums of their sequence tokens and of their seconds."""

    def add(self, work: IterationWork, seconds: float) -> None:
        if not work.chunks:
            count, sequences, total_s = (total * FIT_DECAY for total in self._decodes)
            self._decodes = (count + 1, sequences + work.sequence_tokens, total_s + seconds)
            return
        products = sum(new * (new + context) for new, context in work.chunks)
        row = (1.0, work.new_tokens, work.sequence_tokens, products, seconds)
        for sums, left in zip(self._sums, row, strict=False):
            for column, right in enumerate(row):
                sums[column] = sums[column] * FIT_DECAY + left * right

    def costs(self) -> CostModel | None:
        """The fitted model; None until iteration sizes differ clearly and larger iterations take longer."""
        count, new, squares = self._sums[0][0], self._sums[0][1], self._sums[1][1]
        if count < MIN_ITERATIONS or count * squares - new * new < 0.01 * new * new:  # spread: a tenth of the mean
            return None
        for terms in TERMS:
            found = _solved([[self._sums[i][j] for j in (*terms, 4)] for i in terms])
            if found is not None and found[1] > 0 and min(found[1:]) >= 0:
                by_term = dict(zip(terms, found, strict=True))
                forward = self._forward(by_term[0], by_term[1], by_term.get(2, 0.0))
                return CostModel(forward, 0.0, by_term.get(2, 0.0), 0.0, LongAttention(product_s=by_term.get(3, 0.0)))
        return None

    def _forward(self, constant_s: float, token_s: float, context_s: float) -> PiecewiseLinear:
        count, sequences, total_s = self._decodes
        constant_s = max(0.0, constant_s)
        least_s = (total_s - context_s * sequences) / count if count else 0.0
        if least_s <= constant_s:
            return PiecewiseLinear(((0, constant_s),), token_s)
        crossing = max(1, round((least_s - constant_s) / token_s))
        return PiecewiseLinear(((0, least_s), (crossing, max(least_s, constant_s + crossing * token_s))), token_s)


def _solved(equations: list[list[float]]) -> list[float] | None:
    """Solve symmetric equations, as many as unknowns, by elimination; None if they are nearly dependent."""
    rows = [list(row) for row in equations]
    for i, pivot in enumerate(rows):
        if pivot[i] <= 1e-6 * equations[i][i]:
            return None
        for other in rows[i + 1 :]:
            share = other[i] / pivot[i]
            for j in range(i, len(pivot)):
                other[j] -= share * pivot[j]
    unknowns: list[float] = []
    for i in range(len(rows) - 1, -1, -1):
        known = sum(coefficient * value for coefficient, value in zip(rows[i][i + 1 : -1], unknowns, strict=True))
        unknowns.insert(0, (rows[i][-1] - known) / rows[i][i])
    return unknowns
