"""A booking: one call on the engine that it was placed on, from the decision to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from plait.policy.placement.load import LedgerEntry
from plait.policy.placement.prefill_queue import Prefill
from plait.policy.prefix.node import Node
from plait.policy.types import Call, Placement


class BookingState(StrEnum):
    """The state of a booking."""

    HELD = "held"
    SENT = "sent"
    STREAMING = "streaming"
    SETTLED = "settled"
    RELEASED = "released"


BOOKING_TRANSITIONS: dict[BookingState, frozenset[BookingState]] = {
    BookingState.HELD: frozenset((BookingState.SENT, BookingState.RELEASED)),
    BookingState.SENT: frozenset((BookingState.STREAMING, BookingState.SETTLED, BookingState.RELEASED)),
    BookingState.STREAMING: frozenset((BookingState.SETTLED, BookingState.RELEASED)),
    BookingState.SETTLED: frozenset(),
    BookingState.RELEASED: frozenset(),
}


class BookingTransitionError(RuntimeError):
    """A booking was started, settled or released in a state that does not allow it. Nothing was changed."""


@dataclass(slots=True, eq=False)
class Booking:
    """The placement of a call, and its entries in the engine's books, which are corrected or undone when it ends.

    The engine was sent the call at `sent_s`. `taken_tokens` were subtracted from the engine's free tokens; its latest
    report was then number `report_number`.
    `context_tokens` is the call's share of the engine's. `iteration_s` and `computed_s` are the engine's at the first
    token. The prompt is expected to take `prefill_s`. The first byte of the answer is late from `late_s` and due at
    `due_s`. The latest piece came at `byte_s`, and `pause_s` is the longest time between two. `client_is_slow` is True
    while a piece of the answer waits for the client to read. `overtaken` counts later calls that were served first
    although they are about as large. `give_up` ends the wait for the first byte.
    """

    call: Call
    placement: Placement
    leaf: Node
    entry: LedgerEntry
    context_tokens: float
    booked_s: float
    taken_tokens: float
    report_number: int
    prefill: Prefill
    state: BookingState = BookingState.HELD
    sent_s: float = inf
    first_token_s: float | None = None
    iteration_s: float = 0.0
    computed_s: float = 0.0
    prefill_s: float = 0.0
    late_s: float = inf
    due_s: float = inf
    byte_s: float = -inf
    pause_s: float = 0.0
    client_is_slow: bool = False
    overtaken: int = 0
    give_up: Callable[[], None] | None = None

    def enter(self, state: BookingState) -> None:
        """Change the state. Raises `BookingTransitionError` if the life cycle has no such step."""
        if state not in BOOKING_TRANSITIONS[self.state]:
            raise BookingTransitionError(f"call {self.call.call_id} is {self.state} and cannot become {state}")
        self.state = state


@dataclass(frozen=True, slots=True)
class Failure:
    """How an engine failed a call. `cause` is the error's code, as metrics show it.

    `moves_waiting` is True if calls that wait there are better sent elsewhere. `retry_after_s` is what the engine asked
    for.
    """

    cause: str
    moves_waiting: bool = True
    retry_after_s: float | None = None


class CallUsage(NamedTuple):
    """The engine's token counts of a call that ended. `cached_tokens` is None if the engine does not report them."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
