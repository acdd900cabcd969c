"""Counts and times preemptions, by comparing the calls of successive plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from plait.policy.scheduling.iteration_work import IterationWork
from plait.policy.scheduling.plan import LocalCall

PREEMPTION_ITERATIONS = 1024
"""The window of P and P_max, in iterations. It is longer than `RECENT_ITERATIONS`, because preemptions are rare
(docs/design/local-scheduler.md).
"""


class PreemptionHistory:
    """P and P_max, and how often each call of the engine was preempted."""

    def __init__(self) -> None:
        self._iteration = 0
        self._generated: deque[int] = deque(maxlen=PREEMPTION_ITERATIONS)
        self._generated_tokens = 0
        self._durations_s: deque[tuple[int, float]] = deque()
        """(iteration, seconds) of each preemption that ended within the window."""
        self._running: dict[LocalCall, None] = {}
        self._preempted_s: dict[LocalCall, float] = {}
        """The time at which each currently preempted call was preempted."""
        self._times: dict[LocalCall, int] = {}

    @property
    def rate(self) -> float:
        """P: preemptions per generated token."""
        return len(self._durations_s) / max(1, self._generated_tokens)

    @property
    def longest_s(self) -> float:
        """P_max: the longest preemption in the window."""
        return max((seconds for _, seconds in self._durations_s), default=0.0)

    def times(self, call: LocalCall) -> int:
        """How often a call has been preempted."""
        return self._times.get(call, 0)

    def on_iteration(self, work: IterationWork) -> None:
        """An iteration is over; `work` is what it computed."""
        self._iteration += 1
        if len(self._generated) == PREEMPTION_ITERATIONS:
            self._generated_tokens -= self._generated[0]
        self._generated.append(work.decodes)
        self._generated_tokens += work.decodes
        while self._durations_s and self._durations_s[0][0] <= self._iteration - PREEMPTION_ITERATIONS:
            self._durations_s.popleft()

    def on_plan(self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall]) -> list[LocalCall]:
        """Compare with the calls of the last plan. Returns the calls that have left the engine since then."""
        before, self._running = self._running, dict.fromkeys(running)
        gone = [call for call in before if call not in self._running]
        if not gone and not self._preempted_s:
            return []
        still = {*gone, *self._preempted_s}.intersection(waiting)
        for call in list(self._preempted_s):
            if call in self._running:
                self._durations_s.append((self._iteration, now_s - self._preempted_s.pop(call)))
            elif call not in still:
                del self._preempted_s[call]
                gone.append(call)
        for call in gone:
            if call in still:
                self._preempted_s[call] = now_s
                self._times[call] = self.times(call) + 1
            else:
                self._times.pop(call, None)
        return [call for call in gone if call not in still]
