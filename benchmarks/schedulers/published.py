"""AccelGen's own choices where Plait's scheduler has others: equation 6, execution in chunks."""

from __future__ import annotations

from dataclasses import replace

from plait.policy.costs.cost_model import PiecewiseLinear
from plait.policy.scheduling.chunking import NO_TIMES, Budget
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.slo import ExecutionTime, Objectives, chunked_execution


def pivot_budget(max_tokens: int, model: IterationModel) -> Budget:
    """Equation 6: time goes with the tokens alone, as at the pivot. Without a pivot only `max_tokens` counts."""
    pivot = model.pivot
    token_s = pivot.time_s / pivot.tokens if pivot else 0.0
    return Budget(max_tokens, replace(NO_TIMES, forward=PiecewiseLinear(((0, 0.0),), token_s)))


class ChunkedObjectives(Objectives):
    """T_e = N_ck T_max, whatever is known of the engine."""

    def execution(self, pace: Pace) -> ExecutionTime:
        """Each chunk takes as long as the longest iteration."""
        return chunked_execution(pace)
