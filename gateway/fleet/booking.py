"""Bookings, and the progress of an engine's answers.

A `Booking` is one call on the engine that it was placed on, from the placement to the call's end.

`Progress` watches one engine. In: calls are sent, bytes arrive, calls end, trials pass. Out, asked twice a second:

- whether the engine is quiet: a first byte is late and no other byte comes, or no open stream gets a byte. Long queues
  and prompts do not make an engine quiet, because a first byte is late only after `PATIENCE` times its predicted time.
  A tool parser may hold arguments back for minutes, so a quiet engine may be healthy, and a trial asks it
  (`fleet_health`);
- which calls the engine may have forgotten: a first byte is late while later calls of about the same size are served,
  or a stream is silent although the engine had time for all of its tokens (`decode_clock`). An engine that reports or
  counts as many calls as it was sent has forgotten none.
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
from plait.policy.prefix.learned_cache import Reach
from plait.policy.prefix.prefix_tree import Node
from plait.policy.types import Call, Placement

DEFAULT_HANG_S = 8.0
"""A quiet engine hangs if it does not answer a trial for this long, and sends no other byte either.

Engines under load may be silent for some seconds.
"""

PATIENCE = 3.0
"""The factor on a predicted time, after which a byte is late: the profile may be wrong."""

LATE_S = 2.0
"""A first byte is late this long after `PATIENCE` times its predicted time. From then on the call can count as
overtaken, and makes a silent engine quiet.
"""

STALL_S = 1.0
"""Streams stand still after their longest pause so far, plus the prefills since, plus this many seconds.

A stream counts once it is twice as old, because events often follow the first token together. A quiet engine is stalled
if a trial has no answer within this time.
"""

SEVERAL_STREAMS = 4
"""With fewer open streams, a whole answer proves a quiet engine healthy: tool parsers may hold back a few streams at
once. With as many, a stream has to prove that streams get their bytes.
"""

UNHEARD_S = 45.0
"""An engine may send nothing to any call for this long. Then its late calls move, and its streams end unless trials
pass. A single stream may be silent for as long, whatever its output limit.

Compiling kernels or a grammar takes 30 s.
"""

SLOTS = 64
"""An engine runs at least this many calls at a time. A call that was sent behind as many others may be waiting for a
slot, and if answers are not streamed, no byte shows that they make progress.
"""

TRIAL_TOKENS = 2
"""The first token shows that an engine computes prompts, the second that it decodes."""

COMPILING_S = 45.0
"""A late call with a grammar may be overtaken for this long, while the engine compiles the grammar."""

OVERTAKEN_CALLS = 3
"""A late call that this many others overtook may be forgotten. Shorter and more urgent calls do not count, because a
scheduler may favour them.
"""


class BookingState(StrEnum):
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
    """A booking was started, settled or released in a state that does not allow it. Nothing has changed."""


class Booking(msgspec.Struct, eq=False):
    """A placed call, and what it added to the engine's figures, which is corrected or undone when the call ends."""

    call: Call
    placement: Placement

    leaf: Node
    """The tree node at which its prompt ends."""

    entry: LedgerEntry

    context_tokens: float
    """Its part of `EngineView.context_tokens`."""

    booked_s: float

    taken_tokens: float
    """Its part of the engine's free tokens."""

    report_number: int
    """The number of the engine's latest report before the booking."""

    prefill: Prefill
    """The uncached part of its prompt."""

    reach: Reach | None
    """What the estimated cache had of its prompt; None: the engine reports, or finds what is predicted."""

    answer_s: float
    """The longest time to decode an answer that is not streamed, whose first byte comes at its end; 0 for a stream."""

    state: BookingState = BookingState.WAITING

    tpot_is_missed: bool = False
    """No iteration of the engine is as short as the promised TPOT."""

    sent_s: float = inf
    """When the engine was sent the call."""

    first_token_s: float | None = None

    iteration_s: float = 0.0
    """`EngineView.sent_iteration_s` at the first token."""

    computed_s: float = 0.0
    """`EngineView.computed_s` at the first token."""

    late_s: float = inf
    """The time from which the first byte is late."""

    byte_s: float = -inf
    """When the latest chunk of the answer arrived."""

    pause_s: float = 0.0
    """The longest time between two chunks."""

    clock_tokens: float = 0.0
    """The engine's decode clock at the first look after the latest chunk."""

    client_is_slow: bool = False
    """A chunk of the answer waits until the client reads (backpressure)."""

    overtaken: int = 0
    """Later calls of about the same size that got a first byte before it."""

    give_up: Callable[[EngineError], None] | None = None
    """Ends the wait for the rest of the answer with this error."""

    def computed_at_s(self) -> float:
        """When its prompt was computed; infinite: not yet; -inf: it was not."""
        if self.state in {BookingState.WAITING, BookingState.SENT}:
            return inf
        return -inf if self.first_token_s is None else self.first_token_s

    def enter(self, state: BookingState) -> None:
        """Change the state. Raises `BookingTransitionError` for a step that is not in `BOOKING_TRANSITIONS`."""
        if state not in BOOKING_TRANSITIONS[self.state]:
            raise BookingTransitionError(f"call {self.call.call_id} is {self.state} and cannot become {state}")
        self.state = state


@dataclass(frozen=True, slots=True)
class Failure:
    """How an engine failed a call."""

    cause: str
    """The error's code, as metrics show it."""
    moves_waiting: bool = True
    """Whether calls there without a first byte should move to other engines."""
    retry_after_s: float | None = None
    """The engine's Retry-After."""
    said: str = ""
    """The error in words."""


class CallUsage(NamedTuple):
    """The engine's token counts of a call that ended. `cached_tokens` is None if the engine does not report them."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


class Progress:
    """One engine's progress. `byte_s` is when it last sent a byte of an answer, or reported new work.

    `waiting` has the sent calls without a byte of their answer, the oldest first.
    """

    def __init__(self, hang_s: float = DEFAULT_HANG_S) -> None:
        self.byte_s = -inf
        self._refuses = False
        self._hang_s = hang_s
        self._proved_s = -inf  # when a trial last passed
        self._proved_streams = False  # whether that trial was a stream
        self._is_distrusted = False  # ejected, and no streamed trial has passed since
        self._late_s = min(LATE_S, hang_s)
        self._answer_s = -inf  # when an answer was last complete
        self.waiting: dict[Booking, None] = {}
        self._streaming: dict[Booking, None] = {}
        self._prefill_s = 0.0  # the sum over `waiting`
        self._clock = DecodeClock()
        self._looked_s = -inf  # the latest look at all streams

    def sent(self, booking: Booking, now_s: float) -> None:
        """The engine was sent a call."""
        if not self.waiting:
            self._prefill_s = 0.0  # drops rounding errors
        self.waiting[booking] = None
        self._prefill_s += booking.prefill.time_s
        booking.sent_s = now_s
        booking.late_s = now_s + PATIENCE * (self._prefill_s + booking.answer_s) + self._late_s

    def byte(self, now_s: float) -> None:
        """The engine gave a sign of life."""
        self.byte_s = max(self.byte_s, now_s)

    def next_byte(self, booking: Booking, now_s: float) -> float:
        """A further chunk of a stream arrived; returns the seconds since the one before. Called for every chunk."""
        if now_s > self.byte_s:
            self.byte_s = now_s
        pause_s = now_s - booking.byte_s
        if pause_s > booking.pause_s:
            booking.pause_s = pause_s
        booking.byte_s = now_s
        return pause_s

    def came(self, booking: Booking, now_s: float, *, is_whole: bool) -> None:
        """A call has its whole answer (`is_whole`), or its first byte. It has overtaken calls that are late."""
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
                break  # `late_s` ascends roughly in the order of sending, so later calls are not late either
            waiting.overtaken += _overtakes(booking, waiting, now_s)

    def refused_again(self) -> bool:
        """The engine refused a call. Returns whether its last outcome was a refusal, too."""
        again, self._refuses = self._refuses, True
        return again

    def answered(self, booking: Booking, output_tokens: int, now_s: float) -> None:
        """A whole answer had `output_tokens` in all choices together."""
        self._clock.answered(booking.call, output_tokens // booking.call.choices, booking.sent_s, now_s)

    def overtaken(self, now_s: float) -> list[Booking]:
        """The late calls without a byte that many others have overtaken."""
        return [one for one in self.waiting if one.overtaken >= OVERTAKEN_CALLS and one.late_s < now_s]

    def outlasting(self, now_s: float) -> list[Booking]:
        """The streams that are silent although the engine had time for `PATIENCE` times all of their tokens.

        Called about twice a second.
        """
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
        """Since when the engine has calls and is silent; now if it has no call."""
        oldest = next(iter(self.waiting or self._streaming), None)
        return now_s if oldest is None else max(self.byte_s, oldest.sent_s)

    def sent_by(self, when_s: float) -> int:
        """How many of the present calls were sent by `when_s`."""
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
        """Whether a trial has to be a stream: several streams are open, or the engine was ejected."""
        if self._is_distrusted:
            return True
        return len(self._streaming) + sum(booking.call.streamed for booking in self.waiting) >= SEVERAL_STREAMS

    def ejected(self) -> None:
        """The engine was ejected: from now on only a streamed trial proves it healthy."""
        self._is_distrusted = True

    def proved(self, model: str, begun_s: float, now_s: float, *, streamed: bool) -> None:
        """A trial has passed. The engine may then be silent for `hang_s` before it is quiet again."""
        self._proved_s, self._proved_streams = now_s, streamed
        self._is_distrusted = self._is_distrusted and not streamed
        self._clock.tried(model, TRIAL_TOKENS, begun_s, now_s)

    def is_quiet(self, now_s: float) -> bool:
        """Whether the engine is silent for longer than its calls explain, so that only a trial can tell its health."""
        is_proved = now_s - self._proved_s <= self._hang_s and (self._proved_streams or not self.needs_stream)
        return not is_proved and (self._owes_first_byte(now_s) or self._stands_still(now_s))

    def has_hung(self, now_s: float) -> bool:
        """Whether an engine that does not answer a trial hangs: it has sent no other byte for about `hang_s`.

        The bound is less by `2 * STALL_S`: until the engine was stalled, new calls may have got their first bytes.
        """
        return self.is_quiet(now_s) and self.silent_s(now_s) > self._hang_s - 2 * STALL_S

    def overdue(self, now_s: float) -> list[Booking]:
        """The late calls without a byte, if the engine has sent nothing to any call for `UNHEARD_S`."""
        since_s = now_s - UNHEARD_S
        return [] if self.byte_s > since_s else [one for one in self.waiting if one.late_s < since_s]

    def abandoned(self, now_s: float) -> list[Booking]:
        """The streams to end, if the engine has sent no byte to any call and passed no trial for `UNHEARD_S`."""
        since_s = now_s - UNHEARD_S
        if max(self.byte_s, self._proved_s) > since_s:
            return []
        return [one for one in self._streaming if one.byte_s < since_s and not one.client_is_slow]

    def _owes_first_byte(self, now_s: float) -> bool:
        """Whether a first byte is late, and no byte of any answer has come for `LATE_S`."""
        if self.silent_s(now_s) <= self._late_s:
            return False
        running = max(1, SLOTS - len(self._streaming))
        return any(booking.late_s < now_s for booking in islice(self.waiting, running))

    def _stands_still(self, now_s: float) -> bool:
        """Whether no older stream got a byte and no answer ended for longer than prefills and usual pauses explain.

        First bytes of new calls do not count. If all clients are slow, the engine is not at fault.
        """
        began = {booking: booking.first_token_s or 0.0 for booking in self._streaming}
        older = [booking for booking, began_s in began.items() if now_s - began_s > 2 * STALL_S]
        if all(booking.client_is_slow for booking in older):
            return False
        since_s = max(self._answer_s, *(booking.byte_s for booking in older))
        prompts_s = sum(booking.prefill.time_s for booking, began_s in began.items() if began_s > since_s)
        pause_s = max(booking.pause_s for booking in older)
        return now_s - since_s > STALL_S + pause_s + prompts_s + self._prefill_s


def _overtakes(booking: Booking, waiting: Booking, now_s: float) -> bool:
    """Whether `booking` was sent after `waiting`, and no scheduler has a reason to serve it first."""
    late, early = booking.call, waiting.call
    return (
        booking.sent_s > waiting.sent_s
        and late.streamed == early.streamed
        and (late.streamed or (late.output_limit or 0) >= (early.output_limit or inf))
        and 2 * booking.placement.missed_tokens >= waiting.placement.missed_tokens
        and late.priority >= early.priority
        and (late.slo, late.objective, late.is_line) == (early.slo, early.objective, early.is_line)
        and not (early.has_grammar and now_s < waiting.late_s + COMPILING_S)
    )
