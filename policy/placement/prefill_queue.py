"""The prompts that wait in one engine to be computed.

A streamed call waits until its first byte. Nothing shows when another call's prefill ends, so it is taken as predicted:
after the prefills before it and its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SMOOTHING = 0.1
"""The weight of a new gap between two first bytes."""

LONGEST_GAP_S = 5.0
"""A longer gap is a pause of the engine, not its pace."""

MOST_PROGRESS = 0.95
"""The part of its prefill that a prompt counts as computed at most while it has no first token."""


@dataclass(slots=True, eq=False)
class Prefill:
    """One call's prefill: uncached tokens, and the seconds that it takes alone. `attention_s` is a part of them.

    `is_urgent` says that the call has a TTFT.
    """

    tokens: int
    time_s: float
    attention_s: float
    booked_s: float
    is_streamed: bool = True
    is_urgent: bool = False


class PrefillQueue:
    """The waiting prefills of one engine, the oldest first. `tokens` and `attention_s` are their sums.

    `urgent_tokens` are those of urgent prefills. The oldest prefill has been computed since `head_s`.
    """

    __slots__ = (
        *("_begun_s", "_gap_s", "_streamed", "_time_s", "_waiting", "_whole"),
        *("attention_s", "head_s", "tokens", "urgent_tokens"),
    )

    def __init__(self) -> None:
        self.tokens = 0
        self.urgent_tokens = 0
        self.attention_s = 0.0
        self._time_s = 0.0
        self._waiting: dict[Prefill, None] = {}
        self._whole: deque[tuple[float, Prefill]] = deque()  # when the prefill of a call that is not streamed ends
        self._streamed = 0
        self._gap_s = 0.0
        self._begun_s: float | None = None
        self.head_s = 0.0

    def __len__(self) -> int:
        """Prefills that wait, or are being computed."""
        return len(self._waiting)

    def add(self, prefill: Prefill) -> None:
        """A call was placed here."""
        if not self._waiting:
            self.head_s = prefill.booked_s
        self._waiting[prefill] = None
        self.tokens += prefill.tokens
        self.urgent_tokens += prefill.tokens * prefill.is_urgent
        self.attention_s += prefill.attention_s
        self._time_s += prefill.time_s
        if prefill.is_streamed:
            self._streamed += 1
        else:
            self._whole.append((prefill.booked_s + self._time_s, prefill))

    def computed(self, prefill: Prefill, now_s: float) -> None:
        """A streamed call has its first byte. While others wait, the time between two of these is the engine's pace."""
        if self._begun_s is not None:
            gap_s = min(now_s - self._begun_s, LONGEST_GAP_S)
            self._gap_s = gap_s if self._gap_s == 0.0 else self._gap_s + SMOOTHING * (gap_s - self._gap_s)
        self.leave(prefill, now_s)
        self._begun_s = now_s if self._streamed else None

    def leave(self, prefill: Prefill, now_s: float) -> None:
        """A call does not wait any more; no effect if it did not."""
        if prefill in self._waiting:
            del self._waiting[prefill]
            self.tokens -= prefill.tokens
            self.urgent_tokens -= prefill.tokens * prefill.is_urgent
            self.attention_s -= prefill.attention_s
            self._time_s -= prefill.time_s
            self._streamed -= prefill.is_streamed
            self.head_s = now_s
        if not self._waiting:
            self._time_s = self.attention_s = 0.0  # rounding ends with the calls
        if self._streamed == 0:
            self._begun_s = None

    def mark(self, prefill: Prefill, *, is_urgent: bool) -> None:
        """A call has got a TTFT, or lost it."""
        if prefill in self._waiting:
            self.urgent_tokens += prefill.tokens * (is_urgent - prefill.is_urgent)
        prefill.is_urgent = is_urgent

    def expire(self, now_s: float) -> None:
        """Prefills of calls that are not streamed end as predicted. This comes before the sums are read at `now_s`."""
        while self._whole and self._whole[0][0] <= now_s:
            _, prefill = self._whole.popleft()
            self.leave(prefill, now_s)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    @property
    def may_expire(self) -> bool:
        """Whether a prefill may end without an event."""
        return bool(self._whole)

    @property
    def most_progress_s(self) -> float:
        """What `progress_s` is at most while nothing happens."""
        return MOST_PROGRESS * next(iter(self._waiting)).time_s if self._waiting else 0.0

    def progress_s(self, now_s: float) -> float:
        """How much of the oldest prefill has been computed, as seconds of it."""
        return min(now_s - self.head_s, self.most_progress_s)

    def wait_s(self, now_s: float) -> float:
        """Seconds until the prefill of a new call would begin.

        The longer of two estimates: the predicted prefills, and the engine's pace times the calls that wait. The second
        is longer where calls wait for room in the KV cache.
        """
        self.expire(now_s)
        if not self._waiting:
            return 0.0
        return max(self._time_s, self._streamed * self._gap_s)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self._streamed == sum(prefill.is_streamed for prefill in self._waiting)
        assert self.tokens == sum(prefill.tokens for prefill in self._waiting)
        assert self.urgent_tokens == sum(prefill.tokens for prefill in self._waiting if prefill.is_urgent)
        assert abs(self._time_s - sum(prefill.time_s for prefill in self._waiting)) < 1e-6 or not self._waiting
        assert abs(self.attention_s - sum(p.attention_s for p in self._waiting)) < 1e-6 or not self._waiting
