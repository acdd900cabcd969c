"""The live sessions, whose contexts may be in the engines' caches, and what these take."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from plait.policy.sessions.known import Context, Session

Spares = Callable[[str], bool]
"""Whether the sessions of a tenant are spared."""


class LiveSessions:
    """The live sessions of one model. Tree blocks have `block_tokens`; one that several contexts have counts once."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sessions: dict[Session, None] = {}
        self._uses: Counter[int] = Counter()  # by the hash of a block
        self._rest = 0  # the tokens of all contexts that are in no whole block of a prompt
        self._of_tenant: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Session]:
        """The live sessions. The one whose latest call passed longest ago is the first."""
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
        """What a tenant's contexts take. Blocks that several have count for each."""
        return self._of_tenant[tenant]

    def needed(self, hashes: Sequence[int], tokens: int) -> int:
        """How many more tokens there would be with a context. Its first blocks may be there already."""
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
        """The session is not live any more. Its contexts have nothing until their next calls come."""
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
        """The context has these whole blocks of a prompt, and so many tokens with the rest of it and its answer."""
        if context.session.is_live:
            common = _common(context.hashes, hashes)
            self._count(context, context.hashes[common:], -1)
            context.hashes, context.tokens = hashes, tokens
            self._count(context, hashes[common:], 1)
        else:
            context.hashes, context.tokens = hashes, tokens

    # What may go.

    def youngest_idle(self, spares: Spares) -> Session | None:
        """The youngest live session without a call. One that `spares` names is taken only if there is no other."""
        idle = [session for session in self._sessions if not session.calls]
        return max(idle, key=lambda one: (not spares(one.tenant), one.born_s)) if idle else None

    def longest_idle(self) -> Session | None:
        """Of those without a call, the one whose latest call passed longest ago."""
        return next((session for session in self._sessions if not session.calls), None)

    def expired(self, worth_s: Callable[[Session], float], now_s: float, spares: Spares) -> Session | None:
        """The one that has been idle longest beyond the time for which keeping its contexts is worth it.

        It is one that this `spares` only if there is no other.
        """
        idle = (session for session in self._sessions if not session.calls)
        over = ((now_s - one.ended_s - worth_s(one), one) for one in idle)
        expired = [(not spares(session.tenant), over_s, session) for over_s, session in over if over_s > 0]
        return max(expired, key=lambda one: one[:2])[2] if expired else None

    def check(self) -> None:
        contexts = [context for session in self._sessions for context in session.contexts]
        assert all(session.is_live for session in self._sessions)
        assert self._uses == Counter(one for context in contexts for one in context.hashes)
        assert self._rest == sum(one.tokens - len(one.hashes) * self._block_tokens for one in contexts)
        of_tenant = Counter[str]()
        for context in contexts:
            of_tenant[context.session.tenant] += context.tokens
        assert +self._of_tenant == +of_tenant

    def _count(self, context: Context, hashes: Sequence[int], sign: int) -> None:
        """Count a context, or count it no more; of its blocks only these."""
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
    """How many first blocks two prompts have in common."""
    most = min(len(first), len(second))
    return bisect_left(range(most), 1, key=lambda place: first[place] != second[place])
