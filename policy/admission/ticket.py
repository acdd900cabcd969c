"""A call that waits, as far as the order in which calls are sent needs to know it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Rank(IntEnum):
    """The class of a call. Within a tenant, a lower one goes first."""

    URGENT = 0
    """It has a TTFT, or somebody waits for its answer and has said so."""
    NORMAL = 1
    THROUGHPUT = 2


@dataclass(slots=True, eq=False)
class Ticket:
    """A call that waits. `tokens` is its prompt and its expected output. `number` is its place among all that came.

    In a class, calls of a lower `priority` go first. `work_s` is the engine time that it takes.
    """

    tenant: str
    tokens: int
    rank: Rank = Rank.NORMAL
    priority: int = 0
    number: int = 0
    work_s: float = 0.0
