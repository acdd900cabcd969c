"""A call that waits, as far as the order in which calls are sent needs to know it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

V = TypeVar("V")


class Rank(IntEnum):
    """The class of a call. Within a tenant, a lower one goes first."""

    URGENT = 0
    """It has a TTFT, or somebody waits for its answer and has said so."""
    NORMAL = 1
    THROUGHPUT = 2


@dataclass(slots=True, eq=False)
class Ticket:
    """A call that waits. `tokens` is its prompt and its expected output. `number` is its place among all that came.

    In a class, calls of a lower `priority` go first. `work_s` is the engine time that it takes. One that `is_back` has
    the number that it had when it came first.
    """

    tenant: str
    tokens: int
    rank: Rank = Rank.NORMAL
    priority: int = 0
    number: int = 0
    work_s: float = 0.0
    is_back: bool = False


T = TypeVar("T", bound=Ticket)


def join(tickets: dict[T, V], ticket: T, value: V) -> None:
    """Add a ticket at the end, or if it is back, in its old place."""
    later = [one for one in tickets if one.number > ticket.number] if ticket.is_back else []
    tickets[ticket] = value
    for one in later:
        tickets[one] = tickets.pop(one)
