"""An engine's last 128 iteration times, prompt chunks and queueing times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from plait.backends.protocol.cache_state import IterationState
from plait.policy.scheduling.plan import RECENT_ITERATIONS


class Iterations:
    """Takes the beginnings and ends of iterations, in the order of iterations even if several are in flight."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}
        self._ended_s = 0.0
        self._durations_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)
        self._chunks: deque[int] = deque(maxlen=RECENT_ITERATIONS)
        self._queued_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)

    @property
    def mean_queue_s(self) -> float:
        """Mean time that the recently admitted calls waited in the engine."""
        return _mean(self._queued_s)

    @property
    def last_s(self) -> float:
        """The last iteration's time; 0 before the first."""
        return self._durations_s[-1] if self._durations_s else 0.0

    def admitted(self, queued_s: float) -> None:
        """A call was scheduled for the first time, after `queued_s` in the queue.

        An emulated iteration may begin a moment before the call came: that is no time in the queue.
        """
        self._queued_s.append(max(0.0, queued_s))

    def computes(self, tokens: Iterable[int]) -> None:
        """An iteration computes these `tokens`, one number for each call. A number above 1 is a prompt chunk."""
        self._chunks.extend([chunk for chunk in tokens if chunk > 1])

    def begin(self, iteration: int, now_s: float) -> None:
        """An iteration was scheduled; `iteration` names it until it ends."""
        self._begun[iteration] = now_s

    def end(self, iteration: int, now_s: float) -> float | None:
        """An iteration's output has come. Returns the iteration's time; None if the iteration is unknown.

        If several are in flight, the time counts from the end of the one before.
        """
        begun_s = self._begun.pop(iteration, None)
        if begun_s is None:
            return None
        duration_s = now_s - max(begun_s, self._ended_s)
        self.took(duration_s)
        self._ended_s = now_s
        return duration_s

    def took(self, duration_s: float) -> None:
        """An iteration took `duration_s`. For engines that know the time without a clock."""
        self._durations_s.append(duration_s)

    def state(self, budget_tokens: int) -> IterationState:
        """The part of the cache-state report on iterations."""
        return IterationState(
            mean_s=_mean(self._durations_s),
            max_s=max(self._durations_s, default=0.0),
            mean_chunk_tokens=_mean(self._chunks),
            budget_tokens=budget_tokens,
        )


def _mean(values: deque[float] | deque[int]) -> float:
    return sum(values) / len(values) if values else 0.0
