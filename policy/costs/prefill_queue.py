"""The prompts that one engine still has to compute: those that it was sent, and those that wait in the gateway.

A streamed call waits until its first byte. Nothing shows when another call's prefill ends, so it is taken as predicted:
after the prefills that were sent before it and its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

MOST_PROGRESS = 0.95
"""The part of its prefill that a prompt counts as computed at most while it has no first token."""


@dataclass(slots=True, eq=False)
class Prefill:
    """One call's prefill: uncached tokens, and the seconds that it takes alone. `attention_s` is a part of them.

    The engine was sent the call at `sent_s`. `is_urgent` says that the call has a TTFT, and `is_own` that this gateway
    has sent it.
    """

    tokens: int
    time_s: float
    attention_s: float
    sent_s: float
    is_streamed: bool = True
    is_urgent: bool = False
    is_own: bool = True


class PrefillQueue:
    """The waiting prefills of one engine. `tokens` and `attention_s` are their sums.

    `urgent_tokens` are those of urgent prefills. `held` counts the prefills of calls that wait in the gateway, and
    `sent` those that the engine was sent and has not computed. `sent_tokens` and `sent_attention_s` are the sums of the
    latter. The oldest of them has been computed since `head_s`. `expires_s` is when the next one ends without an event
    (infinite: none does).
    """

    __slots__ = (
        *("_held", "_own_time_s", "_sent", "_sent_time_s", "_whole"),
        *("attention_s", "expires_s", "head_s", "held", "sent", "sent_attention_s"),
        *("sent_tokens", "tokens", "urgent_tokens"),
    )

    def __init__(self) -> None:
        self.tokens = self.sent_tokens = 0
        self.urgent_tokens = 0
        self.attention_s = self.sent_attention_s = 0.0
        self._sent_time_s = self._own_time_s = 0.0
        self._held: dict[Prefill, None] = {}
        self._sent: dict[Prefill, None] = {}
        self._whole: deque[tuple[float, Prefill]] = deque()  # when the prefill of a call that is not streamed ends
        self.held = self.sent = 0
        self.head_s = 0.0
        self.expires_s = inf

    def __len__(self) -> int:
        """Prefills that wait, or are being computed."""
        return self.held + self.sent

    def add(self, prefill: Prefill) -> None:
        """A call was placed here. It waits in the gateway."""
        self._held[prefill] = None
        self.held += 1
        self.tokens += prefill.tokens
        self.urgent_tokens += prefill.tokens * prefill.is_urgent
        self.attention_s += prefill.attention_s

    def send(self, prefill: Prefill, now_s: float) -> None:
        """The engine was sent the call, which has waited, or was placed here just now."""
        if prefill in self._held:
            del self._held[prefill]
            self.held -= 1
        else:
            self.tokens += prefill.tokens
            self.urgent_tokens += prefill.tokens * prefill.is_urgent
            self.attention_s += prefill.attention_s
        if not self._sent:
            self.head_s = now_s
        prefill.sent_s = now_s
        self._sent[prefill] = None
        self.sent += 1
        self.sent_tokens += prefill.tokens
        self.sent_attention_s += prefill.attention_s
        self._sent_time_s += prefill.time_s
        self._own_time_s += prefill.time_s * prefill.is_own
        if not prefill.is_streamed:
            self._whole.append((now_s + self._sent_time_s, prefill))
            self.expires_s = self._whole[0][0]

    def leave(self, prefill: Prefill, now_s: float) -> None:
        """A call does not wait any more: its prompt is computed, or it has ended; no effect if it did not wait."""
        if prefill in self._sent:
            if prefill is next(iter(self._sent)):
                self.head_s = now_s
            del self._sent[prefill]
            self.sent -= 1
            self.sent_tokens -= prefill.tokens
            self.sent_attention_s -= prefill.attention_s
            self._sent_time_s -= prefill.time_s
            self._own_time_s -= prefill.time_s * prefill.is_own
            if self._whole:
                while self._whole and self._whole[0][1] not in self._sent:
                    self._whole.popleft()
                self.expires_s = self._whole[0][0] if self._whole else inf
        elif prefill in self._held:
            del self._held[prefill]
            self.held -= 1
        else:
            return
        self.tokens -= prefill.tokens
        self.urgent_tokens -= prefill.tokens * prefill.is_urgent
        self.attention_s -= prefill.attention_s
        if not self._sent:  # rounding ends with the calls
            self._sent_time_s = self._own_time_s = self.sent_attention_s = 0.0
            if not self._held:
                self.attention_s = 0.0

    def mark(self, prefill: Prefill, *, is_urgent: bool) -> None:
        """A call has got a TTFT, or lost it."""
        if prefill in self._sent or prefill in self._held:
            self.urgent_tokens += prefill.tokens * (is_urgent - prefill.is_urgent)
        prefill.is_urgent = is_urgent

    def expire(self, now_s: float) -> None:
        """Prefills of calls that are not streamed end as predicted. This comes before the sums are read at `now_s`."""
        while self.expires_s <= now_s:
            ended_s, prefill = self._whole[0]
            self.leave(prefill, ended_s)

    @property
    def own_share(self) -> float:
        """The part of what the engine was sent, by time, that this gateway has sent."""
        return self._own_time_s / self._sent_time_s if self._sent_time_s else 1.0

    @property
    def most_progress_s(self) -> float:
        """What `progress_s` is at most while nothing happens."""
        return MOST_PROGRESS * next(iter(self._sent)).time_s if self._sent else 0.0

    def progress_s(self, now_s: float) -> float:
        """How much of the oldest prefill that was sent has been computed, as seconds of it."""
        return min(now_s - self.head_s, self.most_progress_s)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        for prefills, tokens, attention_s in (
            ([*self._held, *self._sent], self.tokens, self.attention_s),
            (list(self._sent), self.sent_tokens, self.sent_attention_s),
        ):
            assert tokens == sum(prefill.tokens for prefill in prefills)
            assert abs(attention_s - sum(prefill.attention_s for prefill in prefills)) < 1e-6 or not prefills
        assert (self.held, self.sent) == (len(self._held), len(self._sent))
        assert self.expires_s == (self._whole[0][0] if self._whole else inf)
        waiting = [*self._held, *self._sent]
        assert self.urgent_tokens == sum(prefill.tokens for prefill in waiting if prefill.is_urgent)
        assert abs(self._sent_time_s - sum(prefill.time_s for prefill in self._sent)) < 1e-6 or not self._sent
        assert abs(self._own_time_s - sum(prefill.time_s for prefill in self._sent if prefill.is_own)) < 1e-6
