"""TTFT slack: how much longer a call's first token may take than on an idle engine.

The slack of recent calls tells how long an iteration may keep the next arrival waiting.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from plait.policy.cost_model import CostModel
from plait.policy.scheduling.batching import Candidate
from plait.policy.scheduling.plan import LocalCall
from plait.policy.scheduling.slo import Objectives

SLACK_CALLS = 128
"""Ours: calls whose slack is remembered."""

SLACK_MEMORY_S = 60.0
"""Ours: a call's slack is remembered for this long."""


class TtftSlack:
    """The slack of the latest calls that have started."""

    def __init__(self) -> None:
        self._starting_s: dict[LocalCall, float] = {}
        self._slacks_s: deque[tuple[float, float]] = deque()
        """(when the call started, its slack), the latest last."""
        self._sorted_s: list[float] = []

    def expect(self, slacks_s: Mapping[LocalCall, float]) -> None:
        """These calls were picked, with their slack. It counts once the engine runs them."""
        self._starting_s = dict(slacks_s)

    def on_plan(self, now_s: float, running: Sequence[LocalCall]) -> None:
        """The engine runs these calls."""
        for call in [call for call in running if call in self._starting_s] if self._starting_s else ():
            self.on_start(now_s, self._starting_s.pop(call))

    def on_start(self, now_s: float, slack_s: float) -> None:
        """A call with so much slack has started."""
        self._slacks_s.append((now_s, slack_s))
        insort(self._sorted_s, slack_s)
        if len(self._slacks_s) > SLACK_CALLS:
            self._sorted_s.remove(self._slacks_s.popleft()[1])

    def quartile_s(self, now_s: float) -> float | None:
        """The lower quartile of recent TTFT slack; None if no call with a TTFT has started lately."""
        while self._slacks_s and self._slacks_s[0][0] < now_s - SLACK_MEMORY_S:
            self._sorted_s.remove(self._slacks_s.popleft()[1])
        return self._sorted_s[len(self._sorted_s) // 4] if self._slacks_s else None


def slacks_s(starting: Iterable[Candidate], objectives: Objectives, costs: CostModel | None) -> dict[LocalCall, float]:
    """The TTFT slack of the calls that start, where it is positive; empty without a model of the engine."""
    slacks: dict[LocalCall, float] = {}
    if costs is None:
        return slacks
    for one in starting:
        slo = objectives.of(one.call)
        if slo is not None and slo.ttft_s is not None:
            slack_s = slo.ttft_s - costs.prefill_time_s(one.tokens, one.context_tokens)
            if slack_s > 0:
                slacks[one.call] = slack_s
    return slacks
