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
    """A call was settled, released or started twice; nothing was changed."""


@dataclass(slots=True, eq=False)
class Booking:
    """What was decided for a call, and what has to be undone or corrected when it ends.

    `taken_tokens` of the engine's free room were booked with it, after its report number `report_number`. `work` is
    the call's share of the engine's outstanding work. `victims` are the prefixes that it is expected to push out.
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
    """What the engine reported for a call that ended; `cached_tokens` is None where it does not say."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
