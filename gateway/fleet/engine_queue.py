"""How long a new call would wait in an engine: estimated from the calls that were placed there."""

from __future__ import annotations

from collections import deque

from plait.gateway.fleet.booking import Booking

SMOOTHING = 0.1
"""The weight of a new gap between two first bytes."""

LONGEST_GAP_S = 5.0
"""A longer gap is a pause of the engine, not its pace."""


class EngineQueue:
    """The calls of one engine that wait for their prefill.

    A streamed call waits until its first byte. Nothing shows when another call's prefill ends, so it is taken as
    predicted: after the prefills before it and its own.
    """

    def __init__(self) -> None:
        self._prefill_s = 0.0
        self._waiting: dict[Booking, float] = {}  # with the prefill that each counts for
        self._whole: deque[tuple[float, Booking]] = deque()  # when the prefill of a call that is not streamed ends
        self._streamed = 0
        self._gap_s = 0.0
        self._begun_s: float | None = None

    def book(self, booking: Booking, prefill_s: float) -> None:
        """A call was placed here."""
        if not self._waiting:
            self._prefill_s = 0.0  # rounding ends with the calls
        self._waiting[booking] = prefill_s
        self._prefill_s += prefill_s
        if booking.call.streamed:
            self._streamed += 1
        else:
            self._whole.append((booking.booked_s + self._prefill_s, booking))

    def first_byte(self, booking: Booking, now_s: float) -> None:
        """A streamed call has its first byte. While others wait, the time between two of these is the engine's pace."""
        if self._begun_s is not None:
            gap_s = min(now_s - self._begun_s, LONGEST_GAP_S)
            self._gap_s = gap_s if self._gap_s == 0.0 else self._gap_s + SMOOTHING * (gap_s - self._gap_s)
        self.leave(booking)
        self._begun_s = now_s if self._streamed else None

    def leave(self, booking: Booking) -> None:
        """A call does not wait any more; no effect if it did not."""
        prefill_s = self._waiting.pop(booking, None)
        if prefill_s is not None:
            self._prefill_s -= prefill_s
            self._streamed -= booking.call.streamed
        if self._streamed == 0:
            self._begun_s = None

    def wait_s(self, now_s: float) -> float:
        """Seconds until the prefill of a new call would begin.

        The longer of two estimates: the predicted prefills, and the engine's pace times the calls that wait. The second
        is longer where calls wait for room in the KV cache.
        """
        while self._whole and self._whole[0][0] <= now_s:
            self.leave(self._whole.popleft()[1])
        if not self._waiting:
            return 0.0
        return max(self._prefill_s, self._streamed * self._gap_s)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self._streamed == sum(booking.call.streamed for booking in self._waiting)
        assert abs(self._prefill_s - sum(self._waiting.values())) < 1e-6 or not self._waiting
