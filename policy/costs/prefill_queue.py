"""The prompts that one engine still has to compute, as this gateway knows them.

In: a call is placed (`add`), sent (`send`), and leaves at its first token or its end (`leave`). Out: sums of tokens and
attention seconds in O(1), from which placement predicts a queueing delay.

A prefill is unsent (its call waits in the gateway), then sent. The engine is taken to compute sent prefills one after
the other, the oldest since `head_s`. The prefill of a streamed call ends with the first byte. Without streaming no byte
shows the end, so a timer does: the prefill ends when all those sent before it and its own would have been computed.

An engine with our scheduler first computes prompts that can still meet their deadline. So there are sums by
`Precedence`, too: `find_late` moves the prefills whose deadline can no longer be met, before such sums are read.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from math import inf

MOST_PROGRESS = 0.95
"""A prefill without a first token counts as computed at most to this part, however long ago it began."""


class Precedence(IntEnum):
    """The class of a sent prompt. In the engine, a prompt waits for the prompts of its own class."""

    ON_TIME = 0
    """The call can still meet its TTFT or JCT, and the engine serves such calls first."""
    SMALL = 1
    """The prompt adds little to the engine's iterations."""
    REST = 2


@dataclass(slots=True, eq=False)
class Prefill:
    """One call's prefill."""

    tokens: int
    """Prompt tokens that are not cached."""
    time_s: float
    """Predicted seconds of the prefill alone on the engine."""
    attention_s: float
    """The part of `time_s` that is attention."""
    sent_s: float
    is_streamed: bool = True
    is_on_time: bool = False
    """The prefill can still end by `due_s`."""
    due_s: float = inf
    """Infinite: no deadline, or not known."""
    is_small: bool = False
    """Whether the prompt adds little to iterations (`EngineView.is_small`); set when the call is sent."""
    tenant: str = ""
    is_own: bool = True
    """This gateway has sent the call."""
    is_line: bool = False
    """The call is a line of a batch, for which no other call waits. It is in no queue."""

    @property
    def precedence(self) -> Precedence:
        if self.is_on_time:
            return Precedence.ON_TIME
        return Precedence.SMALL if self.is_small else Precedence.REST

    @property
    def begins_by_s(self) -> float:
        """The latest start of a prefill that meets its deadline."""
        return self.due_s - self.time_s


class PrefillQueue:
    """The prefills of one engine that are not computed.

    - `tokens`, `attention_s`: sums over all of them; `on_time_tokens`: over those on time.
    - `unsent`, `sent`: how many are in each state.
    - `sent_tokens`, `sent_attention_s`: sums over the sent; `tokens_of`: their tokens by precedence; `tenants`: their
      number by tenant.
    - `oldest`: the one that was sent first; `head_s`: when the engine began it.
    - `computed_tokens`, `computed_attention_s`: all that was computed so far, the begun part of aborted ones included.
    - `expires_s`: when the next prefill ends by the timer; infinite: none does.
    """

    __slots__ = (
        *("_begin_by", "_unsent", "_on_time", "_order", "_own_time_s", "_rest", "_sent", "_sent_time_s", "_whole"),
        *("attention_s", "computed_attention_s", "computed_tokens", "expires_s", "head_s", "oldest", "unsent"),
        *("on_time_tokens", "sent", "sent_attention_s"),
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
        self._on_time: dict[Prefill, None] = {}  # the sent ones of this precedence, in the order of sending
        self._rest: dict[Prefill, None] = {}  # the same of this precedence
        self._whole: deque[tuple[float, Prefill]] = deque()  # (predicted end, prefill) of calls that are not streamed
        self._begin_by: list[tuple[float, int, Prefill]] = []  # a heap by `begins_by_s`; entries may be stale
        self._order = count()
        self.oldest: Prefill | None = None
        self.unsent = self.sent = 0
        self.head_s = 0.0
        self.expires_s = inf

    def __len__(self) -> int:
        return self.unsent + self.sent

    def add(self, prefill: Prefill) -> None:
        """A call was placed here, and waits in the gateway."""
        self._unsent[prefill] = None
        self.unsent += 1
        self.tokens += prefill.tokens
        self.attention_s += prefill.attention_s
        if prefill.is_on_time:
            self._expect(prefill)

    def send(self, prefill: Prefill, now_s: float) -> None:
        """The engine was sent the call, from the gateway's line or right after its placement."""
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
            self.head_s, self.oldest = now_s, prefill
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
        """A call's prompt is computed, or the call has ended. No effect on a prefill that is not in the queue."""
        if prefill in self._sent:
            self._add_computed(prefill, now_s, is_computed=is_computed)
            del self._sent[prefill]
            if prefill is self.oldest:
                self.oldest = next(iter(self._sent), None)
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
        if not self._sent:  # an empty sum is 0, so rounding errors do not add up
            self._sent_time_s = self._own_time_s = self.sent_attention_s = 0.0
            if not self._unsent:
                self.attention_s = 0.0

    def _add_computed(self, prefill: Prefill, now_s: float, *, is_computed: bool) -> None:
        """Count a leaving prefill as computed: all of it, or the progress of the oldest. Then the next one begins."""
        is_oldest = prefill is self.oldest
        if is_computed:
            self.computed_tokens += prefill.tokens
            self.computed_attention_s += prefill.attention_s
        elif is_oldest:
            self.computed_tokens, self.computed_attention_s = self.computed(now_s)
        if is_oldest:
            self.head_s = now_s

    def _clear(self) -> None:
        """The queue is empty. Sums become exactly 0, so rounding errors do not add up."""
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
        """A call's deadline has changed; infinite: none."""
        self._count(prefill, is_on_time=False)
        prefill.due_s = due_s
        if due_s < inf:
            self._count(prefill, is_on_time=True)
            if prefill in self._sent or prefill in self._unsent:
                self._watch(prefill)

    def expire(self, now_s: float) -> None:
        """End the prefills of calls that are not streamed at their predicted times. Call this before reading sums."""
        while self.expires_s <= now_s:
            ended_s, prefill = self._whole[0]
            self.leave(prefill, ended_s, is_computed=True)

    def find_late(self, now_s: float) -> None:
        """Mark the prefills that can no longer be on time. Call this before reading sums by precedence."""
        while self.late_s <= now_s:
            begins_by_s, _, prefill = heappop(self._begin_by)
            if prefill.begins_by_s == begins_by_s:  # otherwise `mark` changed the deadline, and pushed another entry
                self._count(prefill, is_on_time=False)

    @property
    def late_s(self) -> float:
        """The next time at which a prefill may become late."""
        return self._begin_by[0][0] if self._begin_by else inf

    def behind(self) -> tuple[int, float]:
        """(tokens, attention seconds) of the sent prefills that are not being computed.

        The engine is taken to compute the oldest prefill of precedence `REST`.
        """
        if not self._rest:
            return self.sent_tokens, self.sent_attention_s
        computed = next(iter(self._rest))
        return self.sent_tokens - computed.tokens, self.sent_attention_s - computed.attention_s

    def on_time_before(self, due_s: float) -> int:
        """Tokens of the sent prompts on time that are due by `due_s`. Other gateways' deadlines count as later."""
        return sum(one.tokens for one in self._on_time if one.due_s <= due_s)

    def own_on_time(self, tenant: str, due_s: float = inf) -> int:
        """Tokens of a tenant's prompts on time that this gateway has sent and that are due by `due_s`."""
        own = (one for one in self._on_time if one.is_own and one.tenant == tenant)
        return sum(one.tokens for one in own if one.due_s <= due_s)

    def _expect(self, prefill: Prefill) -> None:
        self.on_time_tokens += prefill.tokens
        if prefill.due_s < inf:
            self._watch(prefill)

    def _watch(self, prefill: Prefill) -> None:
        heappush(self._begin_by, (prefill.begins_by_s, next(self._order), prefill))

    def _count(self, prefill: Prefill, *, is_on_time: bool) -> None:
        """Change a prefill's `is_on_time` with the sums. A prefill that has left the queue is in no sum."""
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
        """Add a sent prefill to the sums of its precedence."""
        precedence = prefill.precedence
        self.tokens_of[precedence] += prefill.tokens
        if precedence is Precedence.REST:
            self._rest[prefill] = None
        elif precedence is Precedence.ON_TIME:
            self._on_time[prefill] = None

    def _leave(self, prefill: Prefill) -> None:
        """Take a sent prefill out of the sums of its precedence."""
        precedence = prefill.precedence
        self.tokens_of[precedence] -= prefill.tokens
        if precedence is Precedence.REST:
            del self._rest[prefill]
        elif precedence is Precedence.ON_TIME:
            del self._on_time[prefill]

    @property
    def own_share(self) -> float:
        """The part of the sent prefills' seconds that this gateway has sent."""
        return self._own_time_s / self._sent_time_s if self._sent_time_s else 1.0

    @property
    def most_progress_s(self) -> float:
        """The upper bound of `progress_s` until the next event."""
        return 0.0 if self.oldest is None else MOST_PROGRESS * self.oldest.time_s

    def computed(self, now_s: float) -> tuple[float, float]:
        """(tokens, attention seconds) computed so far, with the progress of the oldest prefill."""
        oldest = self.oldest
        if oldest is None or oldest.time_s <= 0.0:
            return self.computed_tokens, self.computed_attention_s
        share = max(0.0, self.progress_s(now_s)) / oldest.time_s
        return self.computed_tokens + share * oldest.tokens, self.computed_attention_s + share * oldest.attention_s

    def progress_s(self, now_s: float) -> float:
        """The computed seconds of the oldest sent prefill."""
        so_far_s, most_s = now_s - self.head_s, 0.0 if self.oldest is None else MOST_PROGRESS * self.oldest.time_s
        return so_far_s if so_far_s < most_s else most_s  # placement reads it for each engine that it compares
