"""Bookings: each is one call on the engine that it was placed on, from the decision to its end.

`Progress` watches how one engine's answers come along: which calls wait for their first byte, and when the last byte
came. An engine is quiet if a first byte is late and no other byte comes, or if it begins streams and does not go on
with them. Its queue and its prompts are not held against it: a call's first byte is late only `PATIENCE` times after
the prediction. A tool parser holds arguments back for minutes, so a quiet engine may be well. A trial asks it
(`fleet_health`). A call is forgotten if its first byte is late and the engine goes on to serve later calls that are
about as large, or if its stream is silent although the engine had time for all of its tokens (`decode_clock`). An
engine that says that it has all its calls has forgotten none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from math import inf
from typing import NamedTuple

import msgspec

from plait.backends.errors import EngineError
from plait.gateway.fleet.decode_clock import DecodeClock, may_starve
from plait.policy.costs.load import LedgerEntry
from plait.policy.costs.prefill_queue import Prefill
from plait.policy.prefix.prefix_tree import Node
from plait.policy.types import Call, Placement

DEFAULT_HANG_S = 8.0
"""A quiet engine hangs if it leaves a trial without an answer for so long, and nothing else comes of it.

Engines under load were seen silent for up to some seconds.
"""

PATIENCE = 3.0
"""A first byte is late after this many times its predicted time, which may rest on the wrong profile."""

LATE_S = 2.0
"""A first byte is late this much after patience ends. Then the engine is asked if it is quiet, and the call can be
overtaken.
"""

STALL_S = 1.0
"""Streams stand still after this much more than their longest pause so far and the prompts that are computed meanwhile.

A stream is judged when it is twice as old: what comes with its first token says nothing about the next ones. A quiet
engine is stalled if it has not answered a trial within this time.
"""

SEVERAL_STREAMS = 4
"""With fewer open streams, a whole answer shows that a quiet engine is well: a few answers whose tools' arguments are
held back may well come together. With as many, a stream has to show that the engine's streams go on.
"""

UNHEARD_S = 45.0
"""For so long an engine may send nothing to any call. Then its late calls move, and its streams end unless trials pass.
So long a stream may be silent whatever its output limit.

Compiling kernels or a grammar takes 30 s.
"""

SLOTS = 64
"""An engine computes so many calls at the same time, or more. One that was sent behind as many others may wait until an
answer ends, which is not streamed perhaps.
"""

TRIAL_TOKENS = 2
"""The first token shows that an engine computes prompts, the second that it decodes."""

COMPILING_S = 45.0
"""For so long after a call with a grammar is late, later calls may overtake it: the grammar is compiled first."""

OVERTAKEN_CALLS = 3
"""A late call that so many others overtook is forgotten. Short or urgent calls do not count: a scheduler may favour
them.
"""


class BookingState(StrEnum):
    """The state of a booking."""

    WAITING = "waiting"
    SENT = "sent"
    STREAMING = "streaming"
    SETTLED = "settled"
    RELEASED = "released"


BOOKING_TRANSITIONS: dict[BookingState, frozenset[BookingState]] = {
    BookingState.WAITING: frozenset((BookingState.SENT, BookingState.RELEASED)),
    BookingState.SENT: frozenset((BookingState.STREAMING, BookingState.SETTLED, BookingState.RELEASED)),
    BookingState.STREAMING: frozenset((BookingState.SETTLED, BookingState.RELEASED)),
    BookingState.SETTLED: frozenset(),
    BookingState.RELEASED: frozenset(),
}


class BookingTransitionError(RuntimeError):
    """A booking was started, settled or released in a state that does not allow it. Nothing was changed."""


class Booking(msgspec.Struct, eq=False):
    """The placement of a call, and its entries in the engine's books, which are corrected or undone when it ends."""

    call: Call
    placement: Placement

    leaf: Node
    """Where its prompt ends in the prefix tree."""

    entry: LedgerEntry

    context_tokens: float
    """Its share of the engine's."""

    booked_s: float

    taken_tokens: float
    """What was subtracted from the engine's free tokens."""

    report_number: int
    """That of the engine's latest report then."""

    prefill: Prefill
    """What the engine is expected to compute of its prompt."""

    answer_s: float
    """How long an answer takes at most of which the first byte comes with its end; 0 for a stream."""

    state: BookingState = BookingState.WAITING

    sent_s: float = inf
    """When the engine was sent the call."""

    first_token_s: float | None = None

    iteration_s: float = 0.0
    """The time of an iteration of the calls that the engine had been sent, at the first token."""

    computed_s: float = 0.0
    """What prompts had added to the engine's iterations at the first token."""

    late_s: float = inf
    """From when on the first byte of the answer is late."""

    byte_s: float = -inf
    """When the latest piece of the answer came."""

    pause_s: float = 0.0
    """The longest time between two pieces."""

    clock_tokens: float = 0.0
    """The engine's decode clock at a look after the latest piece."""

    client_is_slow: bool = False
    """Whether a piece of the answer waits for the client to read."""

    overtaken: int = 0
    """Later calls that were served first although they are about as large."""

    give_up: Callable[[EngineError], None] | None = None
    """Ends the wait for more of the answer with this error."""

    def enter(self, state: BookingState) -> None:
        """Change the state. Raises `BookingTransitionError` if the life cycle has no such step."""
        if state not in BOOKING_TRANSITIONS[self.state]:
            raise BookingTransitionError(f"call {self.call.call_id} is {self.state} and cannot become {state}")
        self.state = state


@dataclass(frozen=True, slots=True)
class Failure:
    """How an engine failed a call. `cause` is the error's code, as metrics show it, and `said` the error for people.

    `moves_waiting` is True if calls that wait there are better sent elsewhere. `retry_after_s` is what the engine asked
    for.
    """

    cause: str
    moves_waiting: bool = True
    retry_after_s: float | None = None
    said: str = ""


class CallUsage(NamedTuple):
    """The engine's token counts of a call that ended. `cached_tokens` is None if the engine does not report them."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


class Progress:
    """One engine's progress. `byte_s` is when it last sent a byte of an answer, or reported something new.

    `waiting` has the calls without a byte of their answer, the oldest first.
    """

    def __init__(self, hang_s: float = DEFAULT_HANG_S) -> None:
        self.byte_s = -inf
        self._refuses = False
        self._hang_s = hang_s
        self._proved_s = -inf  # when a trial last showed that the engine computes
        self._proved_streams = False  # whether it was a stream
        self._is_distrusted = False  # it was ejected, and has not shown since that its streams go on
        self._late_s = min(LATE_S, hang_s)
        self._answer_s = -inf  # when an answer was last complete
        self.waiting: dict[Booking, None] = {}
        self._streaming: dict[Booking, None] = {}
        self._prefill_s = 0.0  # of the calls that wait
        self._clock = DecodeClock()
        self._looked_s = -inf  # at the streams

    def sent(self, booking: Booking, now_s: float) -> None:
        """The engine was sent a call."""
        if not self.waiting:
            self._prefill_s = 0.0  # rounding ends with the calls
        self.waiting[booking] = None
        self._prefill_s += booking.prefill.time_s
        booking.sent_s = now_s
        booking.late_s = now_s + PATIENCE * (self._prefill_s + booking.answer_s) + self._late_s

    def byte(self, now_s: float) -> None:
        """Something came."""
        self.byte_s = max(self.byte_s, now_s)

    def next_byte(self, booking: Booking, now_s: float) -> float:
        """A further piece of a stream came; returns the seconds since the one before. Every chunk comes here."""
        if now_s > self.byte_s:
            self.byte_s = now_s
        pause_s = now_s - booking.byte_s
        if pause_s > booking.pause_s:
            booking.pause_s = pause_s
        booking.byte_s = now_s
        return pause_s

    def came(self, booking: Booking, now_s: float, *, is_whole: bool) -> None:
        """A call has its whole answer, or its first byte: then it streams from now on.

        Calls that wait past their time were overtaken.
        """
        if now_s > self.byte_s:
            self.byte_s = now_s
        self._refuses = False
        if is_whole:
            self._answer_s = now_s
            self._streaming.pop(booking, None)
        else:
            self._streaming[booking] = None
            booking.byte_s = now_s
        if booking not in self.waiting:
            return
        del self.waiting[booking]
        self._prefill_s -= booking.prefill.time_s
        for waiting in self.waiting:
            if waiting.late_s >= now_s:
                break  # calls are late about in the order in which they came
            waiting.overtaken += _overtakes(booking, waiting, now_s)

    def refused_again(self) -> bool:
        """The engine refused a call: whether it has done so before, and answered none since."""
        again, self._refuses = self._refuses, True
        return again

    def answered(self, booking: Booking, output_tokens: int, now_s: float) -> None:
        """A whole answer had so many tokens in all of its choices."""
        self._clock.answered(booking.call, output_tokens // booking.call.choices, booking.sent_s, now_s)

    def forgotten(self, now_s: float) -> list[Booking]:
        """The calls that the engine has forgotten. Called about twice a second."""
        return [
            *(b for b in self.waiting if b.overtaken >= OVERTAKEN_CALLS and b.late_s < now_s),
            *self._outlasting(now_s),
        ]

    def _outlasting(self, now_s: float) -> list[Booking]:
        """The streams that are silent although the engine had time for all of their tokens, patience included."""
        found = []
        for stream in self._streaming:
            tokens, call = self._clock.tokens(stream.call.model), stream.call
            if stream.byte_s > self._looked_s or stream.client_is_slow:
                stream.clock_tokens = tokens
            elif stream.byte_s + UNHEARD_S < now_s and not may_starve(call):
                limit = call.output_limit or inf
                if tokens - stream.clock_tokens > PATIENCE * limit:
                    found.append(stream)
        self._looked_s = now_s
        return found

    def owes_since_s(self, now_s: float) -> float:
        """Since when the engine is silent although it has calls; now if it has none."""
        oldest = next(iter(self.waiting or self._streaming), None)
        return now_s if oldest is None else max(self.byte_s, oldest.sent_s)

    def sent_by(self, when_s: float) -> int:
        """How many of the calls that have not ended were sent by then."""
        return sum(booking.sent_s <= when_s for booking in (*self.waiting, *self._streaming))

    def leave(self, booking: Booking) -> None:
        """A call has ended without its whole answer."""
        if booking in self.waiting:
            del self.waiting[booking]
            self._prefill_s -= booking.prefill.time_s
        self._streaming.pop(booking, None)

    def silent_s(self, now_s: float) -> float:
        """Seconds since the last byte."""
        return now_s - self.byte_s

    @property
    def needs_stream(self) -> bool:
        """Whether a trial has to be a stream: many are open, or the engine was ejected."""
        if self._is_distrusted:
            return True
        return len(self._streaming) + sum(booking.call.streamed for booking in self.waiting) >= SEVERAL_STREAMS

    def ejected(self) -> None:
        """The engine was ejected. A whole answer does not show that its streams go on."""
        self._is_distrusted = True

    def proved(self, model: str, begun_s: float, now_s: float, *, streamed: bool) -> None:
        """A trial has shown that the engine computes. Until the next one, the engine may be silent for a time."""
        self._proved_s, self._proved_streams = now_s, streamed
        self._is_distrusted = self._is_distrusted and not streamed
        self._clock.tried(model, TRIAL_TOKENS, begun_s, now_s)

    def is_quiet(self, now_s: float) -> bool:
        """Whether only a trial can tell if the engine computes."""
        is_proved = now_s - self._proved_s <= self._hang_s and (self._proved_streams or not self.needs_stream)
        return not is_proved and (self._owes_first_byte(now_s) or self._stands_still(now_s))

    def has_hung(self, now_s: float) -> bool:
        """Whether an engine that has left a trial without an answer hangs: nothing else has come of it either.

        New calls may have got their first bytes until they went to other engines.
        """
        return self.is_quiet(now_s) and self.silent_s(now_s) > self._hang_s - 2 * STALL_S

    def overdue(self, now_s: float) -> list[Booking]:
        """The late calls without a byte, if the engine has sent nothing to any call for `UNHEARD_S`."""
        since_s = now_s - UNHEARD_S
        return [] if self.byte_s > since_s else [one for one in self.waiting if one.late_s < since_s]

    def abandoned(self, now_s: float) -> list[Booking]:
        """The streams of which nothing more is expected: no byte to any call, and no passed trial, for `UNHEARD_S`."""
        since_s = now_s - UNHEARD_S
        if max(self.byte_s, self._proved_s) > since_s:
            return []
        return [one for one in self._streaming if one.byte_s < since_s and not one.client_is_slow]

    def _owes_first_byte(self, now_s: float) -> bool:
        """Whether a first byte is late and no byte of any answer comes."""
        if self.silent_s(now_s) <= self._late_s:
            return False
        running = max(1, SLOTS - len(self._streaming))
        return any(booking.late_s < now_s for booking in islice(self.waiting, running))

    def _stands_still(self, now_s: float) -> bool:
        """Whether no stream goes on and no answer ends for longer than prompts and the streams' own pauses explain.

        New calls may have got their first bytes meanwhile. A stream whose client does not read is owed nothing.
        """
        began = {booking: booking.first_token_s or 0.0 for booking in self._streaming}
        older = [booking for booking, began_s in began.items() if now_s - began_s > 2 * STALL_S]
        if all(booking.client_is_slow for booking in older):
            return False
        since_s = max(self._answer_s, *(booking.byte_s for booking in older))
        prompts_s = sum(booking.prefill.time_s for booking, began_s in began.items() if began_s > since_s)
        pause_s = max(booking.pause_s for booking in older)
        return now_s - since_s > STALL_S + pause_s + prompts_s + self._prefill_s

    def check(self, bookings: int) -> None:
        """Assert the invariants for an engine with this many calls; for tests."""
        assert len(self.waiting) + len(self._streaming) == bookings
        assert abs(self._prefill_s - sum(booking.prefill.time_s for booking in self.waiting)) < 1e-6 or not self.waiting


def _overtakes(booking: Booking, waiting: Booking, now_s: float) -> bool:
    """Whether no engine has a reason to serve `booking` before `waiting`, which came first."""
    late, early = booking.call, waiting.call
    return (
        booking.sent_s > waiting.sent_s
        and late.streamed == early.streamed
        and (late.streamed or (late.output_limit or 0) >= (early.output_limit or inf))
        and 2 * booking.placement.missed_tokens >= waiting.placement.missed_tokens
        and late.priority >= early.priority
        and (late.slo, late.objective) == (early.slo, early.objective)
        and not (early.has_grammar and now_s < waiting.late_s + COMPILING_S)
    )
