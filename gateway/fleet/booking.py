"""A booking: one call on the engine that it was placed on, from the decision to its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plait.policy.placement.load import LedgerEntry
from plait.policy.placement.outstanding import Work
from plait.policy.prefix.node import Node
from plait.policy.prefix.residency import Victim
from plait.policy.types import Call, Placement


class BookingState(StrEnum):
    """A call's life as the router sees it."""

    BOOKED = "booked"
    STREAMING = "streaming"
    SETTLED = "settled"
    RELEASED = "released"


BOOKING_TRANSITIONS: dict[BookingState, frozenset[BookingState]] = {
    BookingState.BOOKED: frozenset((BookingState.STREAMING, BookingState.SETTLED, BookingState.RELEASED)),
    BookingState.STREAMING: frozenset((BookingState.SETTLED, BookingState.RELEASED)),
    BookingState.SETTLED: frozenset(),
    BookingState.RELEASED: frozenset(),
}


class BookingTransitionError(RuntimeError):
    """A call was settled, released or started twice. Nothing was changed."""


@dataclass(slots=True, eq=False)
class Booking:
    """The decision for a call, and the bookkeeping to undo or correct when it ends.

    `taken_tokens` were taken from the engine's free tokens, as of its report number `report_number`. `work` is the
    call's share of the engine's outstanding work. `victims` are the prefixes that it is expected to evict.
    """

    call: Call
    placement: Placement
    leaf: Node
    entry: LedgerEntry
    work: Work
    booked_s: float
    taken_tokens: float
    report_number: int
    victims: list[Victim]
    state: BookingState = BookingState.BOOKED
    first_token_s: float | None = None

    def enter(self, state: BookingState) -> None:
        """Take a step of the life cycle; raises `BookingTransitionError`."""
        if state not in BOOKING_TRANSITIONS[self.state]:
            raise BookingTransitionError(f"call {self.call.call_id} is {self.state} and cannot become {state}")
        self.state = state


@dataclass(frozen=True, slots=True)
class CallUsage:
    """The engine's token counts of a call that ended. `cached_tokens` is None if the engine does not report them."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
