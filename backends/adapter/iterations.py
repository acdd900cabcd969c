"""The last 128 iterations of an engine: how long they took, how long prompt chunks were, how long calls had queued."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from plait.backends.protocol.cache_state import IterationState
from plait.policy.scheduling.plan import RECENT_ITERATIONS


class Iterations:
    """Told of iterations as they begin and end, in that order even where several are in flight."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}
        self._ended_s = 0.0
        self._durations_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)
        self._chunks: deque[int] = deque(maxlen=RECENT_ITERATIONS)
        self._queued_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)

    @property
    def mean_queue_s(self) -> float:
        """Mean time that calls lately admitted had waited in the engine."""
        return _mean(self._queued_s)

    @property
    def last_s(self) -> float:
        """How long the last one took, 0 before there was one."""
        return self._durations_s[-1] if self._durations_s else 0.0

    def admitted(self, queued_s: float) -> None:
        """A call was scheduled for the first time."""
        self._queued_s.append(queued_s)

    def computes(self, tokens: Iterable[int]) -> None:
        """An iteration has so many tokens of each of its calls; more than one are a chunk of a prompt."""
        self._chunks.extend([chunk for chunk in tokens if chunk > 1])

    def begin(self, iteration: int, now_s: float) -> None:
        """The iteration called so, until it ends, was scheduled."""
        self._begun[iteration] = now_s

    def end(self, iteration: int, now_s: float) -> float | None:
        """Its output is there: how long it took. While several are in flight, each counts from the one before's end."""
        begun_s = self._begun.pop(iteration, None)
        if begun_s is None:
            return None
        duration_s = now_s - max(begun_s, self._ended_s)
        self.took(duration_s)
        self._ended_s = now_s
        return duration_s

    def took(self, duration_s: float) -> None:
        """One took so long: for who knows that without a clock."""
        self._durations_s.append(duration_s)

    def state(self, budget_tokens: int) -> IterationState:
        """What is reported of them."""
        return IterationState(
            mean_s=_mean(self._durations_s),
            max_s=max(self._durations_s, default=0.0),
            mean_chunk_tokens=_mean(self._chunks),
            budget_tokens=budget_tokens,
        )


def _mean(values: deque[float] | deque[int]) -> float:
    return sum(values) / len(values) if values else 0.0
