"""An engine's recent speed: the figures from which remaining times are computed (AccelGen, 4.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.iteration_work import IterationWork
from plait.policy.scheduling.outputs import START_OUTPUT_TOKENS, MeanOutputs
from plait.policy.scheduling.plan import RECENT_ITERATIONS
from plait.policy.scheduling.preemption_history import PreemptionHistory
from plait.policy.types import Objective


@dataclass(frozen=True, slots=True)
class Pace:
    """The paper's figures.

    `longest_s` is T_max, the longest recent iteration. `chunk_tokens` is L_c, the mean chunk. `preemption_rate` is P,
    preemptions per generated token. `longest_preemption_s` is P_max. `tokens_per_s` is S_pf / T_pf, the throughput at
    the pivot, None while it is not known. `mean_outputs` are S_g by objective. `shortest_s` is ours: the iteration with
    one token, 0 while it is not known.
    """

    longest_s: float
    shortest_s: float
    chunk_tokens: float
    preemption_rate: float = 0.0
    longest_preemption_s: float = 0.0
    tokens_per_s: float | None = None
    mean_outputs: Mapping[Objective | None, float] = field(default_factory=dict)
    pivot_tokens: int = 0
    """S_pf, at most the engine's own maximum."""

    @classmethod
    def of(
        cls,
        iterations: RecentIterations,
        model: IterationModel,
        preemptions: PreemptionHistory,
        outputs: MeanOutputs,
        max_batch_tokens: int,
    ) -> Pace:
        """The figures now. Before the first iteration, T_max is T_pf and L_c is S_pf.

        While no pivot is known, S_pf is `max_batch_tokens` and T_pf is 0.
        """
        costs, pivot = model.costs, model.pivot
        pivot_tokens = min(pivot.tokens, max_batch_tokens) if pivot else max_batch_tokens
        return cls(
            longest_s=iterations.longest_s(pivot.time_s if pivot else 0.0),
            shortest_s=costs.iteration_time_s(((1, 0),)) if costs else 0.0,
            chunk_tokens=iterations.mean_chunk_tokens(float(pivot_tokens)),
            preemption_rate=preemptions.rate,
            longest_preemption_s=preemptions.longest_s,
            tokens_per_s=pivot.tokens / pivot.time_s if pivot and pivot.time_s > 0 else None,
            pivot_tokens=pivot_tokens,
            mean_outputs=outputs.means(),
        )

    def output_tokens(self, objective: Objective | None) -> float:
        """S_g: the mean output of the calls with this objective that ended recently."""
        return self.mean_outputs.get(objective, START_OUTPUT_TOKENS)

    @property
    def token_s(self) -> float:
        """The longest time for one generated token: T_max + P_max P."""
        return self.longest_s + self.longest_preemption_s * self.preemption_rate


class RecentIterations:
    """The durations of the latest iterations, and the latest chunks of prompts."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)
        self._chunks: deque[int] = deque(maxlen=RECENT_ITERATIONS)
        self._chunk_tokens = 0

    def on_iteration(self, duration_s: float, work: IterationWork) -> None:
        """An iteration is over; `work` is what it computed."""
        self._durations_s.append(duration_s)
        for chunk in work.chunks:
            if len(self._chunks) == RECENT_ITERATIONS:
                self._chunk_tokens -= self._chunks[0]
            self._chunks.append(chunk)
            self._chunk_tokens += chunk

    def longest_s(self, default_s: float) -> float:
        """T_max: the longest duration; `default_s` before the first iteration."""
        return max(self._durations_s, default=default_s)

    def mean_chunk_tokens(self, default: float) -> float:
        """L_c: the mean chunk; `default` before the first chunk."""
        return self._chunk_tokens / len(self._chunks) if self._chunks else default
