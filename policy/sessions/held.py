"""A call of a session, and those that are held until there is room for their contexts."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from plait.policy.sessions.contexts import Context, Session
from plait.policy.types import Call

FIRST_BETWEEN_S: Final = 10.0
"""Between two turns that pass, until it has been measured."""

BETWEEN_KEPT: Final = 0.9
"""What a mean keeps with each further one."""


class Arrival(NamedTuple):
    """A call as the gate sees it, and the `session` that its client has named (empty: none).

    One that `passes` is never held: the others of its program wait for it.
    """

    call: Call
    output_tokens: int
    tenant: str = ""
    session: str = ""
    passes: bool = False


@dataclass(slots=True, eq=False)
class Turn:
    """A call that has come, and the context that it goes on with; None for chat."""

    asked: Arrival
    context: Context | None
    is_held: bool = False
    is_sent: bool = False

    @property
    def tokens(self) -> int:
        """Its prompt and the answer that is expected."""
        return self.asked.call.prompt_tokens + self.asked.output_tokens

    @property
    def session(self) -> Session:
        """Of a call that is not chat."""
        assert self.context is not None
        return self.context.session

    def tried_for_s(self, now_s: float) -> float:
        """How long its client has tried."""
        return 0.0 if self.session.tried_s is None else now_s - self.session.tried_s


class HeldTurns:
    """The turns that are held. A tenant's go by the birth of their sessions: who has begun goes before who has not."""

    def __init__(self) -> None:
        self._turns: dict[str, list[Turn]] = {}
        self._between_s = FIRST_BETWEEN_S
        self._passed_s = 0.0

    def __iter__(self) -> Iterator[Turn]:
        """All of them."""
        return chain.from_iterable(self._turns.values())

    def __len__(self) -> int:
        """How many turns are held."""
        return sum(map(len, self._turns.values()))

    @property
    def tenants(self) -> list[str]:
        """Those of whom turns are held."""
        return list(self._turns)

    def of(self, tenant: str) -> list[Turn]:
        """A tenant's turns, in their order."""
        return self._turns.get(tenant, [])

    def add(self, turn: Turn, now_s: float) -> None:
        """A turn is held."""
        if not self._turns:
            self._passed_s = now_s
        turn.is_held = True
        turn.session.held += 1
        insort(self._turns.setdefault(turn.asked.tenant, []), turn, key=lambda one: one.session.born_s)

    def remove(self, turn: Turn) -> None:
        """A turn is held no more."""
        turns = self._turns[turn.asked.tenant]
        turns.remove(turn)
        turn.is_held = False
        turn.session.held -= 1
        if not turns:
            del self._turns[turn.asked.tenant]

    def passed(self, now_s: float) -> None:
        """A turn that was held passes."""
        self._between_s += (1 - BETWEEN_KEPT) * (now_s - self._passed_s - self._between_s)
        self._passed_s = now_s

    def next_tenant(self, share: Callable[[str], float]) -> str | None:
        """The tenant that goes next: the one with the least `share`. None if nobody is held."""
        return min(self._turns, key=share, default=None)

    def outlook(self, turn: Turn) -> tuple[int, float]:
        """A turn's place among its tenant's, and the seconds until it passes, by how often one has passed."""
        place = self._turns[turn.asked.tenant].index(turn) + 1
        return place, place * len(self._turns) * self._between_s

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert all(self._turns.values())
        for tenant, turns in self._turns.items():
            assert all(turn.is_held and turn.asked.tenant == tenant for turn in turns)
            assert turns == sorted(turns, key=lambda one: one.session.born_s)
