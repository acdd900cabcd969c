"""How fast waiting work goes: seconds of predicted work that leave the queue in a second."""

from __future__ import annotations

SMOOTHING_S = 10.0
"""The rate follows about the last ten seconds."""

FIRST_S = 5.0
"""The first rate is that of so long a time. Calls leave a cold fleet slowly at first: it computes their prompts."""

NEXT_S = 0.5
"""Between two looks at the rate."""


class DrainRate:
    """Corrects predicted work by what was seen. Until calls have left, so many `engines` do a second of it each."""

    def __init__(self, engines: int = 1) -> None:
        self._rate = float(max(1, engines))
        self.is_measured = False
        self._work_s = 0.0
        self._since_s: float | None = None

    def left(self, work_s: float, now_s: float) -> None:
        """A call left the queue."""
        if self._since_s is None:
            self._since_s, self._work_s = now_s, 0.0
            return
        self._work_s += work_s
        elapsed_s = now_s - self._since_s
        if elapsed_s >= (NEXT_S if self.is_measured else FIRST_S):
            share = min(1.0, elapsed_s / SMOOTHING_S) if self.is_measured else 1.0
            self.is_measured = True
            self._rate += share * (self._work_s / elapsed_s - self._rate)
            self._since_s, self._work_s = now_s, 0.0

    def pause(self) -> None:
        """The queue is empty: the time until the next call says nothing of the rate."""
        self._since_s = None

    def seconds(self, work_s: float) -> float:
        """How long this much work takes to leave."""
        return work_s / max(self._rate, 1e-3)
