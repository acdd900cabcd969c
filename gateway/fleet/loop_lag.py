"""How late the gateway's own event loop was. What it missed meanwhile is no engine's fault."""

from __future__ import annotations

from collections import deque
from math import inf

LEAST_LAG_S = 0.25
"""Less does not count: silences are judged in seconds, and a busy loop is always late by some hundredths of one."""

LATE_SHARE = 0.25
"""A wait for so large a part of which the loop was late says nothing of an engine."""

KEPT_S = 120.0
"""Longer than any silence that is judged."""


class LoopLag:
    """The times at which the loop was late, by a task that wakes up at known times."""

    def __init__(self) -> None:
        self._lags: deque[tuple[float, float]] = deque()  # (when it went on, by how much it was late)
        self._due_s = inf

    def expects(self, due_s: float) -> None:
        """The task is to wake up at this time."""
        self._due_s = due_s

    def woke(self, now_s: float) -> float:
        """The task has woken up; returns by how much it was late, in seconds."""
        lag_s, self._due_s = max(0.0, now_s - self._due_s), inf
        if lag_s >= LEAST_LAG_S:
            self._lags.append((now_s, lag_s))
        while self._lags and self._lags[0][0] < now_s - KEPT_S:
            self._lags.popleft()
        return lag_s

    def since(self, since_s: float, now_s: float) -> float:
        """For how long the loop was late between two times, with the lag that may not be over yet."""
        late_s = 0.0
        for went_on_s, lag_s in reversed(self._lags):
            if went_on_s <= since_s:
                break
            late_s += min(lag_s, went_on_s - since_s)
        unseen_s = now_s - max(since_s, self._due_s)
        return late_s + (unseen_s if unseen_s >= LEAST_LAG_S else 0.0)

    def hides(self, since_s: float, now_s: float) -> bool:
        """Whether the loop was late for so much of this time that it may have missed what an engine sent."""
        return self.since(since_s, now_s) > LATE_SHARE * (now_s - since_s)
