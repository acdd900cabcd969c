"""AccelGen's own choices where Plait's scheduler has others: equation 6, execution in chunks."""

from __future__ import annotations

from math import inf

from plait.policy.costs.cost_model import Pivot
from plait.policy.scheduling.chunking import Budget
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.slo import ExecutionTime, Objectives, chunked_execution


class PivotBudget:
    """Equation 6: time goes with the tokens alone, as at the pivot. Without a pivot only `max_tokens` counts."""

    def __init__(self, max_tokens: int, pivot: Pivot | None) -> None:
        self.tokens = 0
        self.limit_s = inf
        self._max_tokens = max_tokens
        self._token_s = pivot.time_s / pivot.tokens if pivot else 0.0

    def time_s(self, new_tokens: int = 0, context_tokens: int = 0) -> float:
        """How long the iteration would take with one more call in it."""
        del context_tokens
        return (self.tokens + new_tokens) * self._token_s

    def least_s(self, context_tokens: int) -> float:
        """A token's time."""
        return self.time_s(1, context_tokens)

    def room(self, wanted_tokens: int, context_tokens: int = 0, floor_tokens: int = 0) -> int:
        """How many of a call's tokens it has room for."""
        del context_tokens
        room = most = min(wanted_tokens, self._max_tokens - self.tokens)
        if self._token_s and self.limit_s < inf:
            # Rounding may not lose the last token of a budget that comes out whole.
            room = min(most, int(self.limit_s / self._token_s + 1e-9) - self.tokens)
        return max(0, room, min(floor_tokens, most))

    def take(self, new_tokens: int, context_tokens: int = 0) -> None:
        """Compute so many of a call's tokens in it."""
        del context_tokens
        self.tokens += new_tokens

    def give_back(self, new_tokens: int, context_tokens: int = 0) -> None:
        """Undo a `take`."""
        del context_tokens
        self.tokens -= new_tokens

    def take_decodes(self, new_tokens: int, context_tokens: int) -> None:
        """Compute decodes of so many tokens in all."""
        self.take(new_tokens, context_tokens)


def pivot_budget(max_tokens: int, model: IterationModel) -> Budget:
    """Equation 6 at the engine's pivot."""
    return PivotBudget(max_tokens, model.pivot)


class ChunkedObjectives(Objectives):
    """T_e = N_ck T_max, whatever is known of the engine."""

    def execution(self, pace: Pace) -> ExecutionTime:
        """Each chunk takes as long as the longest iteration."""
        return chunked_execution(pace)
