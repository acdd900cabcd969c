"""The live sessions, whose contexts count as being in the engines' caches, and the tokens of these contexts."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from plait.policy.sessions.known import Context, Session

Spares = Callable[[str], bool]
"""Whether a tenant's sessions are spared: they lose their room only if no other session can."""


class LiveSessions:
    """The live sessions of one model. A tree block that several contexts share counts once in `tokens`."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sessions: dict[Session, None] = {}
        self._uses: Counter[int] = Counter()  # by block hash, how many contexts have the block
        self._rest = 0  # the sum over contexts of the tokens outside whole blocks of prompts
        self._of_tenant: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Session]:
        """The live sessions, those whose latest call passed longest ago first."""
        return iter(self._sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def tokens(self) -> int:
        return len(self._uses) * self._block_tokens + self._rest

    @property
    def tenants(self) -> list[str]:
        return [tenant for tenant, tokens in self._of_tenant.items() if tokens > 0]

    def tokens_of(self, tenant: str) -> int:
        """The sum over a tenant's contexts; blocks in several contexts count for each."""
        return self._of_tenant[tenant]

    def needed(self, hashes: Sequence[int], tokens: int) -> int:
        """By how much `tokens` would grow with a further context, whose first blocks may be shared."""
        there = bisect_left(hashes, 1, key=lambda one: one not in self._uses)
        return tokens - there * self._block_tokens

    # What changes.

    def call(self, session: Session) -> None:
        if session.is_live:
            del self._sessions[session]
        else:
            session.is_live = True
            for context in session.contexts:
                self._count(context, context.hashes, 1)
        self._sessions[session] = None

    def drop(self, session: Session) -> None:
        """The session is no longer live. Its contexts count as empty until their next calls."""
        for context in session.contexts:
            self._count(context, context.hashes, -1)
            context.hashes, context.tokens = (), 0
        session.is_live = False
        del self._sessions[session]

    def close(self, context: Context) -> None:
        session = context.session
        if session.is_live:
            self._count(context, context.hashes, -1)
            if len(session.contexts) == 1:
                session.is_live = False
                del self._sessions[session]

    def change(self, context: Context, hashes: Sequence[int], tokens: int) -> None:
        """The context has a new latest prompt: its whole blocks, and the `tokens` of prompt and answer."""
        if context.session.is_live:
            common = _common(context.hashes, hashes)
            self._count(context, context.hashes[common:], -1)
            context.hashes, context.tokens = hashes, tokens
            self._count(context, hashes[common:], 1)
        else:
            context.hashes, context.tokens = hashes, tokens

    # What may go.

    def youngest_idle(self, spares: Spares) -> Session | None:
        """The youngest live session without a call, spared ones last."""
        idle = [session for session in self._sessions if not session.calls]
        return max(idle, key=lambda one: (not spares(one.tenant), one.born_s)) if idle else None

    def longest_idle(self) -> Session | None:
        """Among the sessions without a call, the one whose latest call passed longest ago."""
        return next((session for session in self._sessions if not session.calls), None)

    def expired(self, worth_s: Callable[[Session], float], now_s: float, spares: Spares) -> Session | None:
        """The session that has been idle longest beyond `worth_s`, spared ones last; None if none has."""
        idle = (session for session in self._sessions if not session.calls)
        over = ((now_s - one.ended_s - worth_s(one), one) for one in idle)
        expired = [(not spares(session.tenant), over_s, session) for over_s, session in over if over_s > 0]
        return max(expired, key=lambda one: one[:2])[2] if expired else None

    def _count(self, context: Context, hashes: Sequence[int], sign: int) -> None:
        """Add a context to the sums (`sign` 1), or take it out (-1), with only these of its blocks."""
        uses = self._uses
        if sign > 0:
            uses.update(hashes)
        else:
            for one in hashes:
                uses[one] -= 1
                if not uses[one]:
                    del uses[one]
        self._rest += sign * (context.tokens - len(context.hashes) * self._block_tokens)
        self._of_tenant[context.session.tenant] += sign * context.tokens


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading blocks two prompts share."""
    most = min(len(first), len(second))
    return bisect_left(range(most), 1, key=lambda place: first[place] != second[place])
