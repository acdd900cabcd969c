"""The conversations of each tenant take turns while their calls wait, and one of them may crowd the others out.

Turns go by tokens (fair queueing by virtual time, Demers et al. 1989). Each conversation has a virtual time, which its
tokens advance, and the next one is that with the earliest. The present advances as if all that wait were served at
once. A conversation that comes begins at the present: it does not wait for all calls of another one, and new ones do
not hold up an old one for ever. One of which nothing waits is forgotten. So conversations with a call at a time, such
as agents, go in the order in which they came. All calls without a conversation are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import dropwhile
from math import inf
from typing import Final, Generic, Protocol, TypeVar

ACTIVE_S: Final = 60.0
"""So long after its last call a conversation counts, as a tenant does."""

MOST_ACTIVE: Final = 1_000
"""So many of a tenant count, the latest ones: clients may name each call anew."""

CROWD_CALLS: Final = 4
"""Fewer calls that wait are no crowd: an agent has its subagents'."""

CROWD_SHARE: Final = 1.5
"""Of its tenant's waiting calls, a crowd is so many times what each active conversation would have of them."""

JUDGED_S: Final = 1.0


class OfConversation(Protocol):
    """A call that waits. `tokens` is its prompt and its expected output. `number` is its place among all that came.

    The name of its `conversation` is empty if it has none. One that `is_back` has the number that it had at first.
    """

    @property
    def conversation(self) -> str:
        """Its name."""

    tokens: int
    number: int
    is_back: bool


T = TypeVar("T", bound=OfConversation)


def join(calls: dict[T, None], call: T) -> None:
    """Add a call at the end, or if it is back, before the first that came after it."""
    behind = list(dropwhile(lambda one: one.number < call.number, calls)) if call.is_back else []
    calls[call] = None
    for one in behind:
        calls[one] = calls.pop(one)


MOST_APART: Final = 64
"""Each choice of a call compares the first calls of all conversations."""

TOGETHER: Final = "\0"
"""No client can name a conversation so."""


class InTurn(Generic[T]):
    """Calls of one tenant that wait, in the turns of their conversations; of each, in the order of joining.

    While calls of `MOST_APART` conversations wait, those of further ones go as one conversation.
    """

    __slots__ = ("_calls", "_names", "_present", "_times")

    def __init__(self) -> None:
        self._calls: dict[str, dict[T, None]] = {}
        self._names: dict[T, str] = {}
        self._times: dict[str, float] = {}  # virtual, in tokens
        self._present = 0.0

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def __iter__(self) -> Iterator[T]:
        """The calls, the next one first, as if each was served in its turn. Of equal ones, the first that came."""
        if len(self._calls) == 1:
            yield from next(iter(self._calls.values()))
            return
        queues = [(iter(calls), self._times[name]) for name, calls in self._calls.items()]
        turns = [((time, (call := next(calls)).number, place), call) for place, (calls, time) in enumerate(queues)]
        heapify(turns)
        while turns:
            (time, _, place), call = turns[0]
            yield call
            following = next(queues[place][0], None)
            if following is None:
                heappop(turns)
            else:
                heapreplace(turns, ((time + call.tokens, following.number, place), following))

    def add(self, call: T) -> None:
        """A call waits."""
        name = call.conversation
        if len(self._calls) >= MOST_APART and name not in self._calls:
            name = TOGETHER
        self._names[call] = name
        calls = self._calls.get(name)
        if calls is None:
            self._times[name] = self._after_those_before(call) if call.is_back else self._present
            self._calls[name] = {call: None}
        else:
            join(calls, call)

    def _after_those_before(self, call: T) -> float:
        """Where a conversation begins whose call is back: after those of which calls wait that came before it."""
        before = (self._times[name] for name, calls in self._calls.items() if next(iter(calls)).number < call.number)
        return max(before, default=min(self._times.values(), default=self._present))

    def serve(self, call: T) -> None:
        """A call goes: its conversation is served its tokens."""
        self._present += call.tokens / len(self._calls)
        self._times[self._names[call]] += call.tokens
        self.remove(call)

    def remove(self, call: T) -> None:
        """A call does not wait any more."""
        name = self._names.pop(call)
        calls = self._calls[name]
        del calls[call]
        if not calls:
            del self._calls[name], self._times[name]

    def defer(self, call: T) -> None:
        """A call goes to the end of its conversation, and this behind the others."""
        name = self._names[call]
        calls = self._calls[name]
        calls[call] = calls.pop(call)
        if len(self._calls) > 1:
            self._times[name] = max(self._times.values()) + 1.0


class TenantConversations:
    """One tenant's conversations: when the `latest` call of each came, the oldest first, and how many of each wait."""

    __slots__ = ("is_crowded", "judged_s", "latest", "waiting")

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self.waiting = Counter[str]()
        self.is_crowded = False
        self.judged_s = -inf

    def forget(self, now_s: float) -> None:
        """Those that have had no call for long do not count any more."""
        latest = self.latest
        while latest:
            name = next(iter(latest))
            if now_s - latest[name] <= ACTIVE_S and len(latest) <= MOST_ACTIVE:
                return
            del latest[name]

    def judge(self, now_s: float) -> None:
        """Look whether there is a crowd."""
        self.forget(now_s)
        self.judged_s = now_s
        most, several = max(self.waiting.values(), default=0), len(self.latest) > 1
        share = self.waiting.total() / max(1, len(self.latest))
        self.is_crowded = several and most >= CROWD_CALLS and most > CROWD_SHARE * share


class Conversations:
    """The conversations of all tenants that are active, and how many calls of each wait."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantConversations] = {}

    def came(self, tenant: str, name: str, now_s: float) -> None:
        """A call has come."""
        mine = self._tenants.get(tenant)
        if mine is None:
            mine = self._tenants[tenant] = TenantConversations()
        mine.latest.pop(name, None)
        mine.latest[name] = now_s
        mine.forget(now_s)

    def waits(self, tenant: str, name: str) -> None:
        """A call waits."""
        self._tenants.setdefault(tenant, TenantConversations()).waiting[name] += 1

    def left(self, tenant: str, name: str) -> None:
        """A call does not wait any more."""
        waiting = self._tenants[tenant].waiting
        waiting[name] -= 1
        if not waiting[name]:
            del waiting[name]

    def largest(self, tenant: str) -> set[str]:
        """Those of which most calls of a tenant wait."""
        waiting = self._tenants[tenant].waiting
        most = max(waiting.values(), default=0)
        return {name for name, calls in waiting.items() if calls == most}

    def check(self, waiting: Iterable[tuple[str, str]]) -> None:
        """Assert the invariants, with the tenant and the conversation of each call that waits; for tests."""
        found = Counter(waiting)
        assert sum(mine.waiting.total() for mine in self._tenants.values()) == found.total()
        assert all(self._tenants[tenant].waiting[name] == calls for (tenant, name), calls in found.items())

    def are_crowded(self, tenant: str, now_s: float) -> bool:
        """Whether several conversations of a tenant are active, and one of them has far more than its share waiting.

        It is judged once a second.
        """
        mine = self._tenants.get(tenant)
        if mine is None or len(mine.latest) < 2:
            return False
        if now_s - mine.judged_s >= JUDGED_S:
            mine.judge(now_s)
        return mine.is_crowded
