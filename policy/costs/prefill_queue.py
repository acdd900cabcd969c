"""The prompts that one engine has to compute: those that it was sent, and those that wait in the gateway.

A streamed call waits until its first byte. Nothing shows when another call's prefill ends, so it is taken as predicted:
after the prefills that were sent before it and its own.

An engine with our scheduler computes the prompts of calls that can still keep their promises before all others. So the
sums are kept by precedence, too.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from math import inf

MOST_PROGRESS = 0.95
"""The part of its prefill that a prompt counts as computed at most while it has no first token."""


class Precedence(IntEnum):
    """A prompt's class among those that an engine was sent: prompts wait there for those of their own class."""

    ON_TIME = 0
    """The call can still keep its TTFT or JCT, and the engine serves such calls first."""
    SMALL = 1
    """The prompt adds little to the engine's iterations."""
    REST = 2


@dataclass(slots=True, eq=False)
class Prefill:
    """One call's prefill: uncached tokens, and the seconds that it takes alone. `attention_s` is a part of them.

    The engine was sent the call at `sent_s`. It `is_on_time` as long as it could still be over by `due_s`; infinite:
    when that is, is not known. It `is_small` or not once it was sent. `tenant` is the call's; `is_own` says that this
    gateway has sent it.
    """

    tokens: int
    time_s: float
    attention_s: float
    sent_s: float
    is_streamed: bool = True
    is_on_time: bool = False
    due_s: float = inf
    is_small: bool = False
    tenant: str = ""
    is_own: bool = True

    @property
    def precedence(self) -> Precedence:
        """The prompt's class."""
        if self.is_on_time:
            return Precedence.ON_TIME
        return Precedence.SMALL if self.is_small else Precedence.REST

    @property
    def begins_by_s(self) -> float:
        """The latest time at which the prefill can begin and still be on time."""
        return self.due_s - self.time_s


class PrefillQueue:
    """The waiting prefills of one engine. `tokens` and `attention_s` are their sums.

    `on_time_tokens` are those of prefills on time. `unsent` counts the prefills of calls that wait in the gateway, and
    `sent` those that the engine was sent and has not computed. `sent_tokens` and `sent_attention_s` are the sums of the
    latter, and `tokens_of` their tokens by precedence. `tenants` counts them by tenant. The oldest of them has been
    computed since `head_s`. `computed_tokens` and `computed_attention_s` are those of all that was computed, also
    of a prefill that was given up. `expires_s` is when the next one ends without an event (infinite: none does).
    """

    __slots__ = (
        *("_begin_by", "_unsent", "_on_time", "_order", "_own_time_s", "_rest", "_sent", "_sent_time_s", "_whole"),
        *("attention_s", "computed_attention_s", "computed_tokens", "expires_s", "head_s", "unsent", "on_time_tokens"),
        *("sent", "sent_attention_s"),
        *("sent_tokens", "tenants", "tokens", "tokens_of"),
    )

    def __init__(self) -> None:
        self.tokens = self.sent_tokens = self.on_time_tokens = 0
        self.tokens_of = [0] * len(Precedence)
        self.tenants = Counter[str]()
        self.attention_s = self.sent_attention_s = 0.0
        self.computed_tokens = self.computed_attention_s = 0.0
        self._sent_time_s = self._own_time_s = 0.0
        self._unsent: dict[Prefill, None] = {}
        self._sent: dict[Prefill, None] = {}
        self._on_time: dict[Prefill, None] = {}  # those of them that are on time
        self._rest: dict[Prefill, None] = {}  # those of them that nothing goes before
        self._whole: deque[tuple[float, Prefill]] = deque()  # when the prefill of a call that is not streamed ends
        self._begin_by: list[tuple[float, int, Prefill]] = []  # a heap of what is on time; entries may be old
        self._order = count()
        self.unsent = self.sent = 0
        self.head_s = 0.0
        self.expires_s = inf

    def __len__(self) -> int:
        """Prefills that wait, or are being computed."""
        return self.unsent + self.sent

    def add(self, prefill: Prefill) -> None:
        """A call was placed here. It waits in the gateway."""
        self._unsent[prefill] = None
        self.unsent += 1
        self.tokens += prefill.tokens
        self.attention_s += prefill.attention_s
        if prefill.is_on_time:
            self._expect(prefill)

    def send(self, prefill: Prefill, now_s: float) -> None:
        """The engine was sent the call, which has waited, or was placed here just now."""
        tokens, time_s, attention_s = prefill.tokens, prefill.time_s, prefill.attention_s
        if prefill in self._unsent:
            del self._unsent[prefill]
            self.unsent -= 1
        else:
            self.tokens += tokens
            self.attention_s += attention_s
            if prefill.is_on_time:
                self._expect(prefill)
        if not self._sent:
            self.head_s = now_s
        prefill.sent_s = now_s
        self._sent[prefill] = None
        self.sent += 1
        self.sent_tokens += tokens
        self._enter(prefill)
        self.tenants[prefill.tenant] += 1
        self.sent_attention_s += attention_s
        self._sent_time_s += time_s
        if prefill.is_own:
            self._own_time_s += time_s
        if not prefill.is_streamed:
            self._whole.append((now_s + self._sent_time_s, prefill))
            self.expires_s = self._whole[0][0]

    def leave(self, prefill: Prefill, now_s: float, *, is_computed: bool = False) -> None:
        """A call does not wait any more: its prompt is computed, or it has ended; no effect if it did not wait."""
        if prefill in self._sent:
            self._add_computed(prefill, now_s, is_computed=is_computed)
            del self._sent[prefill]
            if not self._sent and not self._unsent:
                self._clear()
                return
            self.sent -= 1
            self.sent_tokens -= prefill.tokens
            self._leave(prefill)
            self.tenants[prefill.tenant] -= 1
            if not self.tenants[prefill.tenant]:
                del self.tenants[prefill.tenant]
            self.sent_attention_s -= prefill.attention_s
            self._sent_time_s -= prefill.time_s
            self._own_time_s -= prefill.time_s * prefill.is_own
            if self._whole:
                while self._whole and self._whole[0][1] not in self._sent:
                    self._whole.popleft()
                self.expires_s = self._whole[0][0] if self._whole else inf
        elif prefill in self._unsent:
            del self._unsent[prefill]
            self.unsent -= 1
        else:
            return
        self.tokens -= prefill.tokens
        self.on_time_tokens -= prefill.tokens * prefill.is_on_time
        self.attention_s -= prefill.attention_s
        if not self._sent:  # rounding ends with the calls
            self._sent_time_s = self._own_time_s = self.sent_attention_s = 0.0
            if not self._unsent:
                self.attention_s = 0.0

    def _add_computed(self, prefill: Prefill, now_s: float, *, is_computed: bool) -> None:
        """A prefill that was sent leaves, whole or as far as it has come; the next one is the oldest."""
        is_oldest = prefill is self.oldest
        if is_computed:
            self.computed_tokens += prefill.tokens
            self.computed_attention_s += prefill.attention_s
        elif is_oldest:
            self.computed_tokens, self.computed_attention_s = self.computed(now_s)
        if is_oldest:
            self.head_s = now_s

    def _clear(self) -> None:
        """Nothing waits any more. Rounding ends with the last one."""
        self.sent = self.sent_tokens = self.tokens = self.on_time_tokens = 0
        self._sent_time_s = self._own_time_s = self.sent_attention_s = self.attention_s = 0.0
        self.tokens_of = [0] * len(Precedence)
        self._on_time.clear()
        self._rest.clear()
        self.tenants.clear()
        self._whole.clear()
        self._begin_by.clear()
        self.expires_s = inf

    def mark(self, prefill: Prefill, due_s: float) -> None:
        """A call has got another TTFT or JCT; infinite: none."""
        self._count(prefill, is_on_time=False)
        prefill.due_s = due_s
        if due_s < inf:
            self._count(prefill, is_on_time=True)
            if prefill in self._sent or prefill in self._unsent:
                self._watch(prefill)

    def expire(self, now_s: float) -> None:
        """Prefills of calls that are not streamed end as predicted. This comes before the sums are read at `now_s`."""
        while self.expires_s <= now_s:
            ended_s, prefill = self._whole[0]
            self.leave(prefill, ended_s, is_computed=True)

    def find_late(self, now_s: float) -> None:
        """Mark the prefills that can no longer be on time. Call this before sums by precedence are read."""
        while self.late_s <= now_s:
            begins_by_s, _, prefill = heappop(self._begin_by)
            if prefill.begins_by_s == begins_by_s:
                self._count(prefill, is_on_time=False)

    @property
    def late_s(self) -> float:
        """When the next prefill may be on time no more."""
        return self._begin_by[0][0] if self._begin_by else inf

    def behind(self) -> tuple[int, float]:
        """The tokens of what was sent, and their attention, without the prompt that is computed now.

        That is the oldest one that nothing else is computed before.
        """
        if not self._rest:
            return self.sent_tokens, self.sent_attention_s
        computed = next(iter(self._rest))
        return self.sent_tokens - computed.tokens, self.sent_attention_s - computed.attention_s

    def on_time_before(self, due_s: float, tenant: str | None = None) -> int:
        """The tokens of prompts on time that the engine was sent and that are due by then (None: of all tenants)."""
        return sum(one.tokens for one in self._on_time if one.due_s <= due_s and tenant in {None, one.tenant})

    def _expect(self, prefill: Prefill) -> None:
        """A prefill on time has come."""
        self.on_time_tokens += prefill.tokens
        if prefill.due_s < inf:
            self._watch(prefill)

    def _watch(self, prefill: Prefill) -> None:
        heappush(self._begin_by, (prefill.begins_by_s, next(self._order), prefill))

    def _count(self, prefill: Prefill, *, is_on_time: bool) -> None:
        """A prefill is on time, or is so no more. One that has left counts nowhere."""
        if is_on_time is prefill.is_on_time:
            return
        is_sent = prefill in self._sent
        if is_sent:
            self._leave(prefill)
        if is_sent or prefill in self._unsent:
            self.on_time_tokens += prefill.tokens if is_on_time else -prefill.tokens
        prefill.is_on_time = is_on_time
        if is_sent:
            self._enter(prefill)

    def _enter(self, prefill: Prefill) -> None:
        """Count a prefill that was sent in its precedence."""
        precedence = prefill.precedence
        self.tokens_of[precedence] += prefill.tokens
        if precedence is Precedence.REST:
            self._rest[prefill] = None
        elif precedence is Precedence.ON_TIME:
            self._on_time[prefill] = None

    def _leave(self, prefill: Prefill) -> None:
        """A prefill that was sent does not count in its precedence any more."""
        precedence = prefill.precedence
        self.tokens_of[precedence] -= prefill.tokens
        if precedence is Precedence.REST:
            del self._rest[prefill]
        elif precedence is Precedence.ON_TIME:
            del self._on_time[prefill]

    @property
    def own_share(self) -> float:
        """The part of what the engine was sent, by time, that this gateway has sent."""
        return self._own_time_s / self._sent_time_s if self._sent_time_s else 1.0

    @property
    def oldest(self) -> Prefill | None:
        """The prefill that was sent first; None if none is there."""
        return next(iter(self._sent), None)

    @property
    def most_progress_s(self) -> float:
        """What `progress_s` is at most while nothing happens."""
        return MOST_PROGRESS * next(iter(self._sent)).time_s if self._sent else 0.0

    def computed(self, now_s: float) -> tuple[float, float]:
        """The tokens that were computed so far, and their attention, with those of the oldest prefill's progress."""
        oldest = self.oldest
        if oldest is None or oldest.time_s <= 0.0:
            return self.computed_tokens, self.computed_attention_s
        share = max(0.0, self.progress_s(now_s)) / oldest.time_s
        return self.computed_tokens + share * oldest.tokens, self.computed_attention_s + share * oldest.attention_s

    def progress_s(self, now_s: float) -> float:
        """How much of the oldest prefill that was sent has been computed, as seconds of it."""
        return min(now_s - self.head_s, self.most_progress_s)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        for prefills, tokens, attention_s in (
            ([*self._unsent, *self._sent], self.tokens, self.attention_s),
            (list(self._sent), self.sent_tokens, self.sent_attention_s),
        ):
            assert tokens == sum(prefill.tokens for prefill in prefills)
            assert abs(attention_s - sum(prefill.attention_s for prefill in prefills)) < 1e-6 or not prefills
        assert (self.unsent, self.sent) == (len(self._unsent), len(self._sent))
        assert self.expires_s == (self._whole[0][0] if self._whole else inf)
        waiting = [*self._unsent, *self._sent]
        assert self.on_time_tokens == sum(prefill.tokens for prefill in waiting if prefill.is_on_time)
        for precedence, tokens in enumerate(self.tokens_of):
            assert tokens == sum(prefill.tokens for prefill in self._sent if prefill.precedence == precedence)
        assert set(self._rest) == {prefill for prefill in self._sent if prefill.precedence is Precedence.REST}
        assert set(self._on_time) == {prefill for prefill in self._sent if prefill.precedence is Precedence.ON_TIME}
        assert self.tenants == Counter(prefill.tenant for prefill in self._sent)
        watched = {prefill for _, _, prefill in self._begin_by}
        assert all(prefill in watched for prefill in waiting if prefill.is_on_time and prefill.due_s < inf)
        assert abs(self._sent_time_s - sum(prefill.time_s for prefill in self._sent)) < 1e-6 or not self._sent
        assert abs(self._own_time_s - sum(prefill.time_s for prefill in self._sent if prefill.is_own)) < 1e-6
