"""TTFT slack: how much longer a call's first token may take than on an idle engine.

The slack of recent calls is used to predict the slack of the next arrivals.
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
"""Ours: the slack of this many calls is remembered."""

SLACK_MEMORY_S = 60.0
"""Ours: a call's slack is remembered for this long."""


class TtftSlack:
    """The TTFT slack of the calls that started recently."""

    def __init__(self) -> None:
        self._starting_s: dict[LocalCall, float] = {}
        self._slacks_s: deque[tuple[float, float]] = deque()
        """(start time, slack) of each call, the latest last."""
        self._sorted_s: list[float] = []

    def expect(self, slacks_s: Mapping[LocalCall, float]) -> None:
        """The plan picked these calls. Each call's slack counts once the engine runs the call."""
        self._starting_s = dict(slacks_s)

    def on_plan(self, now_s: float, running: Sequence[LocalCall]) -> None:
        """Count the slack of the expected calls that the engine runs now."""
        for call in [call for call in running if call in self._starting_s] if self._starting_s else ():
            self.on_start(now_s, self._starting_s.pop(call))

    def on_start(self, now_s: float, slack_s: float) -> None:
        """A call with this slack has started."""
        self._slacks_s.append((now_s, slack_s))
        insort(self._sorted_s, slack_s)
        if len(self._slacks_s) > SLACK_CALLS:
            self._sorted_s.remove(self._slacks_s.popleft()[1])

    def quartile_s(self, now_s: float) -> float | None:
        """The lower quartile of recent TTFT slack; None if no call with TTFT slack has started recently."""
        while self._slacks_s and self._slacks_s[0][0] < now_s - SLACK_MEMORY_S:
            self._sorted_s.remove(self._slacks_s.popleft()[1])
        return self._sorted_s[len(self._sorted_s) // 4] if self._slacks_s else None


def slacks_s(starting: Iterable[Candidate], objectives: Objectives, costs: CostModel | None) -> dict[LocalCall, float]:
    """The TTFT slack of the starting calls that have any; empty while the engine's cost model is not known."""
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
