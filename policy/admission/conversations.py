"""The conversations of one tenant take turns while their calls wait (`InTurn`). `Conversations` counts these calls.

Turns are fair queueing by virtual time (Demers et al. 1989). The tokens of a conversation's sent calls advance its
virtual time, and the conversation with the lowest time goes next. The present advances by each sent token over the
number of waiting conversations. A new conversation begins at the present: so it does not wait for all calls of another
one, and a flow of new ones does not starve an old one.

A conversation without waiting calls is forgotten. So clients with one call at a time, such as agents, go in the order
of arrival. All calls without a conversation are one conversation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import dropwhile
from typing import Final, Generic, Protocol, TypeVar


class OfConversation(Protocol):
    """A waiting call, as far as turns need it (see `line.Ticket`)."""

    @property
    def conversation(self) -> str:
        """The conversation's name; empty without one."""

    tokens: int
    number: int
    is_back: bool


T = TypeVar("T", bound=OfConversation)


def join(calls: dict[T, None], call: T) -> None:
    """Add a call at the end; one that is back goes before the first call that arrived after it."""
    behind = list(dropwhile(lambda one: one.number < call.number, calls)) if call.is_back else []
    calls[call] = None
    for one in behind:
        calls[one] = calls.pop(one)


MOST_APART: Final = 64
"""More conversations share one queue: each choice of a call compares the first calls of all queues."""

TOGETHER: Final = "\0"
"""The name of the shared queue. No client can send this name."""


class InTurn(Generic[T]):
    """Waiting calls of one tenant in the turns of their conversations; within one, in the order of joining."""

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
        """The calls in the order in which they would be sent; ties by arrival."""
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
        """The virtual time of a conversation whose call is back: after those with calls that arrived before it."""
        before = (self._times[name] for name, calls in self._calls.items() if next(iter(calls)).number < call.number)
        return max(before, default=min(self._times.values(), default=self._present))

    def serve(self, call: T) -> None:
        """A call is sent: charge its tokens to its conversation."""
        self._present += call.tokens / len(self._calls)
        self._times[self._names[call]] += call.tokens
        self.remove(call)

    def remove(self, call: T) -> None:
        name = self._names.pop(call)
        calls = self._calls[name]
        del calls[call]
        if not calls:
            del self._calls[name], self._times[name]

    def defer(self, call: T) -> None:
        """Move a call to the end of its conversation, and the conversation behind the others."""
        name = self._names[call]
        calls = self._calls[name]
        calls[call] = calls.pop(call)
        if len(self._calls) > 1:
            self._times[name] = max(self._times.values()) + 1.0


class Conversations:
    """How many calls of each conversation wait, by tenant."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def waits(self, tenant: str, name: str) -> None:
        self._waiting[tenant][name] += 1

    def left(self, tenant: str, name: str) -> None:
        """A call no longer waits."""
        waiting = self._waiting[tenant]
        waiting[name] -= 1
        if not waiting[name]:
            del waiting[name]
        if not waiting:
            del self._waiting[tenant]

    def largest(self, tenant: str) -> set[str]:
        """The tenant's conversations with the most waiting calls."""
        waiting = self._waiting.get(tenant, Counter())
        most = max(waiting.values(), default=0)
        return {name for name, calls in waiting.items() if calls == most}

    def check(self, waiting: Iterable[tuple[str, str]]) -> None:
        """Assert the invariants, with the tenant and the conversation of each call that waits; for tests."""
        found = defaultdict[str, Counter[str]](Counter)
        for tenant, name in waiting:
            found[tenant][name] += 1
        assert self._waiting == found
