"""The mean output of the calls that ended recently, by objective."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from plait.policy.scheduling.plan import LocalCall
from plait.policy.types import Objective

START_OUTPUT_TOKENS = 211.0
"""S_g until a call with the objective has ended: the mean output of the Azure conversation trace (2023)."""

RECENT_OUTPUTS = 1024
"""Ours: the mean is over this many of the latest outputs of an objective."""


class MeanOutputs:
    """S_g, the mean output, of each objective."""

    def __init__(self) -> None:
        self._outputs: dict[Objective | None, deque[int]] = {}
        self._sums: dict[Objective | None, int] = {}

    def on_ended(self, calls: Iterable[LocalCall]) -> None:
        """These calls have left the engine."""
        for call in calls:
            outputs = self._outputs.setdefault(call.objective, deque(maxlen=RECENT_OUTPUTS))
            dropped = outputs[0] if len(outputs) == RECENT_OUTPUTS else 0
            outputs.append(max(1, call.output_tokens))
            self._sums[call.objective] = self._sums.get(call.objective, 0) + outputs[-1] - dropped

    def means(self) -> dict[Objective | None, float]:
        """The mean of each objective of which a call has ended."""
        return {objective: self._sums[objective] / len(outputs) for objective, outputs in self._outputs.items()}
