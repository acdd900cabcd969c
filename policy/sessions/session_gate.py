"""The gate of one model: it holds sessions so that the contexts of the live ones fit into the engines' caches.

A synchronous core: each event carries its time. An arriving call is a `Turn`, of a session or of chat. Chat is a prompt
that extends nothing and is short or names no session, or one that only shares its beginning with others, as questions
about a document do: they arrive while others run, or do not continue the last one. Chat is never held, and its tokens
count while it is in an engine.

Events:

- `arrive`: a live session's turn passes, unless the live contexts have outgrown the caches: then the youngest session
  without a call is paused, which may be this one. Another session's turn passes if there is room, otherwise it is held.
- `sent`: a turn that has passed is in an engine.
- `ended`: a turn was answered. Its session stays live, unless its client said that this was the last one.
- `gone`: a turn will not be answered, whether it was held or not.
- `release`: returns the turns that pass now. Call it after each other event, and once in a while.

While the gate is open, all turns pass. It closes where keeping contexts is worth it (`Worth`). Room for the first held
turn comes from a session that has been idle for so long that keeping its context has cost as much as computing it again
will, or for a part of this time while few turns are held. Tenants within their share give room last.

A tenant below its share never waits for a tenant above its own: the latter's youngest idle sessions give room, and if
none is idle, the turn passes without room. No turn is held for longer than `MOST_HELD_S`. See docs/design/sessions.md.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Final, Protocol

from plait.policy.sessions.known import Context, KnownSessions, Session, marked_block
from plait.policy.sessions.live import LiveSessions
from plait.policy.sessions.worth import Caches, Worth
from plait.policy.types import Call

OUTGROWN: Final = 1.05
"""Live contexts grow. A session is paused only once they exceed the caches by a twentieth."""

MOST_LIVE: Final = 2.0
"""While the gate is open, no session is paused. Beyond this multiple of the caches the oldest contexts cannot be cached
any more, so their sessions are no longer live.
"""

MOST_HELD_S: Final = 600.0
"""A turn whose client has tried for this long passes."""

MOST_AWAY_S: Final = 120.0
"""A client that was told to retry and stays away longer starts its time of tries again."""

CHAT_TOKENS: Final = 4_000
"""A shorter prompt that extends none is chat, even if its client names a session."""

HELD_WEIGHT: Final = 2.0
"""With at least half as many turns held as sessions live, an idle context is kept for its whole worth; with fewer, for
a part of this time.
"""

USUAL_THINKS: Final = 1.5
"""An idle context is kept for at least this many mean think times, if its worth is as long."""

CHAT_SHARE: Final = 0.5
"""The most of the caches that chat counts for, so that long prompts without a session do not keep all sessions out."""

FIRST_BETWEEN_S: Final = 10.0
"""The time between two turns that pass, until it is measured."""

BETWEEN_KEPT: Final = 0.9
"""The factor by which the old mean decays with each further value."""


class Arrival(Protocol):
    """A call as the gate sees it."""

    @property
    def call(self) -> Call: ...

    @property
    def output_tokens(self) -> int:
        """The expected length of its answer."""

    @property
    def tenant(self) -> str: ...

    @property
    def session(self) -> str:
        """The session that its client names; empty: none."""

    @property
    def is_final(self) -> bool:
        """Whether its client said that it is the session's last call."""

    @property
    def passes(self) -> bool:
        """Whether the call is never held, because other calls of its program wait for it."""


@dataclass(slots=True, eq=False)
class Turn:
    """A call at a gate."""

    gate: SessionGate
    asked: Arrival
    context: Context | None
    """The context that the call extends or begins; None: it has none."""
    tokens: int
    """Its prompt and the expected answer."""
    is_chat: bool
    is_held: bool = False
    is_sent: bool = False

    @property
    def session(self) -> Session:
        assert self.context is not None
        return self.context.session

    def tried_for_s(self, now_s: float) -> float:
        return 0.0 if self.session.tried_s is None else now_s - self.session.tried_s


class HeldTurns:
    """The held turns by tenant, each tenant's by the birth of their sessions: the oldest session goes first."""

    def __init__(self) -> None:
        self.turns: dict[str, list[Turn]] = {}
        self._between_s = FIRST_BETWEEN_S
        self._passed_s = 0.0

    def __iter__(self) -> Iterator[Turn]:
        return chain.from_iterable(self.turns.values())

    def __len__(self) -> int:
        return sum(map(len, self.turns.values()))

    @property
    def tenants(self) -> list[str]:
        return list(self.turns)

    def of(self, tenant: str) -> list[Turn]:
        return self.turns.get(tenant, [])

    def add(self, turn: Turn, now_s: float) -> None:
        if not self.turns:
            self._passed_s = now_s
        turn.is_held = True
        turn.session.held += 1
        insort(self.turns.setdefault(turn.asked.tenant, []), turn, key=lambda one: one.session.born_s)

    def remove(self, turn: Turn) -> None:
        turns = self.turns[turn.asked.tenant]
        turns.remove(turn)
        turn.is_held = False
        turn.session.held -= 1
        if not turns:
            del self.turns[turn.asked.tenant]

    def passed(self, now_s: float) -> None:
        self._between_s += (1 - BETWEEN_KEPT) * (now_s - self._passed_s - self._between_s)
        self._passed_s = now_s

    def outlook(self, turn: Turn) -> tuple[int, float]:
        """(a turn's place among its tenant's held ones, predicted seconds until it passes)."""
        place = self.turns[turn.asked.tenant].index(turn) + 1
        return place, place * len(self.turns) * self._between_s


class SessionGate:
    """The sessions of one model. `look` returns the engines' caches; None if their sizes are not known.

    `weight` returns a tenant's weight. `paused` counts live sessions that lost their room to others, and `expired`
    those that lost it because they were idle for long.
    """

    def __init__(
        self,
        block_tokens: int,
        look: Callable[[], Caches | None],
        weight: Callable[[str], float] = lambda _tenant: 1.0,
        chat_tokens: float = CHAT_TOKENS,
    ) -> None:
        self.worth = Worth(look)
        self.live = LiveSessions(block_tokens)
        self.held = HeldTurns()
        self.known = KnownSessions(self.live.close)
        self.paused = self.expired = 0
        self._weight = weight
        self._chat_tokens = chat_tokens
        self._chatting_tokens = 0

    @property
    def tokens(self) -> int:
        """The tokens of live contexts, and of chat in engines up to `CHAT_SHARE`."""
        caches, chatting = self.worth.caches, self._chatting_tokens
        return self.live.tokens + (chatting if caches is None else min(chatting, int(CHAT_SHARE * caches.kv_tokens)))

    # Events.

    def arrive(self, asked: Arrival, now_s: float) -> Turn:
        """A call has arrived. If its turn is held, a later `release` returns the turn."""
        if now_s >= self.worth.due_s:
            self.worth.judge(self.known, now_s)
        begins = not asked.passes and asked.call.prompt_tokens >= self._chat_tokens  # if it extends none
        may_go_on = bool(asked.session or self.known.marks)
        context = self._context(asked, now_s, begins=begins) if begins or may_go_on else None
        is_chat = context is None or not context.session.is_proven
        turn = Turn(self, asked, context, asked.call.prompt_tokens + asked.output_tokens, is_chat)
        if context is None:
            return turn
        session = context.session
        context.calls += 1
        if is_chat:
            self.known.mark(context, asked.call.block_hashes, marked_block(asked.call))
            session.calls += 1
            return turn
        if session.tried_s is None or (not session.held and now_s - session.ended_s > MOST_AWAY_S):
            session.tried_s = now_s
        self._resize(context, asked.call.block_hashes, turn.tokens)
        self.known.mark(context, asked.call.block_hashes, marked_block(asked.call))
        passes = self._stays_live(turn) if session.is_live else self._may_be_live(turn, now_s)
        if passes:
            self._pass(turn)
        else:
            self.held.add(turn, now_s)
        return turn

    def sent(self, turn: Turn) -> None:
        turn.is_sent = True
        if turn.is_chat:
            self._chatting_tokens += turn.tokens

    def ended(self, turn: Turn, output_tokens: int | None, now_s: float) -> None:
        """A turn was answered; `output_tokens` is None if not known."""
        context = turn.context
        if context is not None:
            context.ended_s = now_s
        if context is not None and not turn.is_chat and output_tokens is not None:
            self.worth.answered(output_tokens)
            if context.tokens and not context.is_shared:
                self._resize(context, context.hashes, turn.asked.call.prompt_tokens + output_tokens)
        self.gone(turn, now_s)
        if turn.asked.is_final:
            last = self.known.named.get((turn.asked.tenant, turn.asked.session))
            if last is not None and last.is_live and not last.calls:
                self.live.drop(last)

    def gone(self, turn: Turn, now_s: float) -> None:
        """A turn has ended, or will not be answered."""
        if turn.is_chat and turn.is_sent:
            self._chatting_tokens -= turn.tokens
        if turn.context is None:
            return
        turn.session.ended_s = now_s
        turn.context.calls -= 1
        if turn.is_held:
            self.held.remove(turn)
        else:
            turn.session.calls -= 1

    def release(self, now_s: float) -> list[Turn]:
        released = []
        self.worth.judge(self.known, now_s)
        while (turn := self._next(now_s)) is not None:
            self.held.remove(turn)
            self.held.passed(now_s)
            self._pass(turn)
            released.append(turn)
        return released

    # Whose call it is.

    def _context(self, asked: Arrival, now_s: float, *, begins: bool) -> Context | None:
        """The context that a call extends, or a new one that it `begins`; None: the call is chat.

        95 % of the turns of coding agents continue the latest prompt. The others rewrite its end, but not twice in a
        row. A question about a document never continues the question before it. So a context without a name becomes
        shared when two calls in a row extend it without continuing it, or when its calls overlap.
        """
        hashes = asked.call.block_hashes
        context = self.known.extended(asked.tenant, asked.session, hashes)
        if context is not None:
            session, goes_on = context.session, context.is_continued_by(hashes)
            is_again = session.tried_s is not None
            strays = not (asked.session or is_again or goes_on or context.ended_s is None)
            if context.calls or (strays and context.strayed):
                self.known.share(context)
            if not is_again:
                context.strayed = strays
            if context.is_shared:
                return None
            session.is_proven = session.is_proven or goes_on
            if session.is_proven and context.ended_s is not None and not is_again:
                self.worth.returned(now_s - context.ended_s, asked.call.prompt_tokens)
            return context
        return self.known.begin(asked.tenant, asked.session, now_s) if begins else None

    def _resize(self, context: Context, hashes: Sequence[int], tokens: int) -> None:
        self.live.change(context, hashes, tokens)
        caches, session = self.worth.caches, context.session
        if caches is not None:
            session.prefill_s = sum(caches.prefill_s(one.tokens) for one in session.contexts)

    # Who is live.

    def _pass(self, turn: Turn) -> None:
        """Let a turn pass: its session becomes live, with one more call."""
        session = turn.session
        session.calls += 1
        session.tried_s = None
        if not session.contexts:
            return  # its context became shared while the turn was held
        self.live.call(session)
        self.known.called(session)
        caches = self.worth.caches
        if caches is not None and not self.worth.is_closed and self.live.tokens > MOST_LIVE * caches.kv_tokens:
            oldest = self.live.longest_idle()
            if oldest is not None:
                self.live.drop(oldest)

    def _stays_live(self, turn: Turn) -> bool:
        """Whether a live session's turn passes. Pauses the youngest sessions if contexts have outgrown the caches."""
        caches = None if turn.asked.passes else self.worth.caches
        while caches is not None and self.worth.is_closed and self.tokens > OUTGROWN * caches.kv_tokens:
            youngest = self.live.youngest_idle(self._within_shares().__contains__)
            if youngest is None or len(self.live) == 1 or self._is_spared(youngest.tenant):
                break
            self.live.drop(youngest)
            self.paused += 1
            if youngest is turn.session:
                assert turn.context is not None
                self._resize(turn.context, turn.asked.call.block_hashes, turn.tokens)
                return False
        return True

    def _is_spared(self, tenant: str) -> bool:
        """Whether a tenant is within its share while another one is above its own: its sessions are not paused."""
        within = self._within_shares()
        return tenant in within and len(within) < len(self.live.tenants)

    def _may_be_live(self, turn: Turn, now_s: float) -> bool:
        """Whether a turn passes whose session is not live: it need not wait, or there is room and no turn is held."""
        if not self.worth.is_closed or turn.asked.passes or turn.tried_for_s(now_s) >= MOST_HELD_S:
            return True
        slo = turn.asked.call.slo
        if slo is not None and slo.has_zero and self._is_within_share(turn.asked.tenant):
            return True
        return not self.held and self._has_room(turn)

    def _has_room(self, turn: Turn) -> bool:
        caches, context = self.worth.caches, turn.context
        if caches is None or context is None or context.is_shared or context.session.is_live or not self.live:
            return True
        needed = self.live.needed(turn.asked.call.block_hashes, turn.tokens)
        return self.tokens + needed <= caches.kv_tokens

    def _is_within_share(self, tenant: str) -> bool:
        return self._level(tenant) <= self._fair_level(tenant)

    def _level(self, tenant: str) -> float:
        """A tenant's live tokens over its weight."""
        return self.live.tokens_of(tenant) / self._weight(tenant)

    def _within_shares(self) -> set[str]:
        """The tenants with live sessions that are at most at their shares."""
        fair = self._fair_level()
        return {tenant for tenant in self.live.tenants if self._level(tenant) <= fair}

    def _fair_level(self, *more: str) -> float:
        """The level at which a tenant has exactly its share, among those with live or held sessions and `more`."""
        caches, tenants = self.worth.caches, {*more, *self.live.tenants, *self.held.tenants}
        return inf if caches is None else caches.kv_tokens / sum(map(self._weight, tenants))

    def _next(self, now_s: float) -> Turn | None:
        """The turn that passes next; None if the first one has no room, and all others have to wait for it."""
        turns = [self.held.of(tenant)[0] for tenant in sorted(self.held.tenants, key=self._level)]
        if not turns:
            return None
        shared = (turn for turn in self.held if turn.context is not None and turn.context.is_shared)
        first = next(shared, turns[0])
        if self._find_room(first, now_s):
            return first
        late = (turn for turn in self.held if turn.tried_for_s(now_s) >= MOST_HELD_S)
        fair = self._fair_level(first.asked.tenant)
        owed = turns if any(self._level(one) > fair for one in self.live.tenants) else []
        return next((turn for turn in owed if self._take_room(turn, fair)), None) or next(late, None)

    def _find_room(self, turn: Turn, now_s: float) -> bool:
        """Whether there is room for a turn. Expires sessions that have been idle for long to make room."""
        caches, tenant = self.worth.caches, turn.asked.tenant
        while caches is not None and self.worth.is_closed and not self._has_room(turn):
            within = self._within_shares()
            expired = self.live.expired(self._worth_s(caches, within), now_s, (within - {tenant}).__contains__)
            if expired is None:
                return False
            self.live.drop(expired)
            self.expired += 1
        return True

    def _worth_s(self, caches: Caches, within: Collection[str]) -> Callable[[Session], float]:
        """Returns how long each session may be idle before a held one gets its room.

        The time is the session's whole worth, or a part of it while few turns are held, so that finished sessions delay
        no turn for long. The part is at least the time within which most sessions return: otherwise each would find its
        context evicted by the one before. Tenants `within` their shares keep the whole time if another is above its
        own.
        """
        part = min(1.0, HELD_WEIGHT * len(self.held) / max(1, len(self.live)))
        least_s, spared = USUAL_THINKS * self.worth.think_s, within if len(within) < len(self.live.tenants) else ()

        def worth_s(session: Session) -> float:
            whole_s = caches.worth_s(session.tokens)
            return whole_s if session.tenant in spared else min(whole_s, max(least_s, part * whole_s))

        return worth_s

    def _take_room(self, turn: Turn, fair: float) -> bool:
        """Whether other tenants owe a turn its room. Pauses their youngest idle sessions for it.

        A turn is owed room if its tenant has no other live session, or stays within its share with this one. Tenants
        above the `fair` level owe it. A tenant does not owe room to one that would then be at a level as high as its
        own: otherwise two sessions that do not fit together would pause each other again and again.
        """
        tenant = turn.asked.tenant
        own = self._level(tenant)
        level = own + turn.session.tokens / self._weight(tenant)
        if own and level > fair:
            return False
        is_owed = False
        while debtors := {one for one in self.live.tenants if self._level(one) > max(fair, level)}:
            is_owed = True
            youngest = None if self._has_room(turn) else self.live.youngest_idle(lambda one: one not in debtors)
            if youngest is None or youngest.tenant not in debtors:
                break
            self.live.drop(youngest)
            self.paused += 1
        return is_owed
