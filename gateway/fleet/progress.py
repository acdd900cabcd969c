"""How one engine's answers come along: which calls wait for their first byte, and when the last byte came.

An engine is hung if it owes bytes and none come. Its queue and its prompts are not held against it: a call's first byte
is due only `PATIENCE` times as late as predicted. A call is forgotten if its first byte is late and the engine goes on
to serve later calls that are about as large, unless the engine says that it has all its calls. An engine is stalled if
it begins streams and does not go on with them. It should get no new calls: each first byte would hide for a time that
the engine hangs.
"""

from __future__ import annotations

from itertools import islice
from math import inf

from plait.gateway.fleet.booking import Booking

DEFAULT_HANG_S = 8.0
"""The shortest silence that counts as a hang. Engines under load were seen silent for up to some seconds."""

PATIENCE = 3.0
"""A first byte is due after this many times its predicted time, which may rest on the wrong profile."""

LATE_S = 2.0
"""A first byte that is later than patience allows by this much is late: from then on the call can be overtaken."""

STALL_S = 1.0
"""Streams are stalled after this much more than their longest pause so far and the prompts that are computed meanwhile.

A stream is judged when it is twice as old: what comes with its first token says nothing about the next ones.
"""

SLOTS = 64
"""An engine computes so many calls at the same time, or more. One that was sent behind as many others may wait until an
answer ends, which is not streamed perhaps.
"""

OVERTAKEN_CALLS = 3
"""A late call that so many others overtook is forgotten. Short or urgent calls do not count: a scheduler may favour
them.
"""


class Progress:
    """One engine's progress. `byte_s` is when it last sent a byte of an answer, or reported something new.

    `waiting` has the calls without a byte of their answer, the oldest first.
    """

    def __init__(self, hang_s: float = DEFAULT_HANG_S) -> None:
        self.byte_s = -inf
        self._refuses = False
        self._hang_s = hang_s
        self._answer_s = -inf  # when an answer was last complete
        self.waiting: dict[Booking, None] = {}
        self._streaming: dict[Booking, None] = {}
        self._prefill_s = 0.0  # of the calls that wait

    def book(self, booking: Booking, prefill_s: float, answer_s: float) -> None:
        """A call was sent. Its prompt takes `prefill_s`; if it is not streamed, it takes `answer_s` more."""
        if not self.waiting:
            self._prefill_s = 0.0  # rounding ends with the calls
        self.waiting[booking] = None
        self._prefill_s += prefill_s
        booking.prefill_s = prefill_s
        booking.late_s = booking.sent_s + PATIENCE * (self._prefill_s + answer_s) + min(LATE_S, self._hang_s)
        booking.due_s = booking.late_s + self._hang_s - min(LATE_S, self._hang_s)

    def byte(self, now_s: float) -> None:
        """Something came."""
        self.byte_s = max(self.byte_s, now_s)

    def first_byte(self, booking: Booking, now_s: float) -> None:
        """A call has its first byte. It streams from now on."""
        self._came(booking, now_s)
        self._streaming[booking] = None
        booking.byte_s = now_s

    def next_byte(self, booking: Booking, now_s: float) -> None:
        """A further piece of a stream came."""
        self.byte(now_s)
        booking.pause_s = max(booking.pause_s, now_s - booking.byte_s)
        booking.byte_s = now_s

    def answered(self, booking: Booking, now_s: float) -> None:
        """A call has its whole answer."""
        self._came(booking, now_s)
        self._answer_s = now_s

    def _came(self, booking: Booking, now_s: float) -> None:
        """A call has its first byte, or its whole answer. Calls that wait past their time were overtaken."""
        self.byte(now_s)
        self._refuses = False
        was_waiting = booking in self.waiting
        self.leave(booking)
        if not was_waiting:
            return
        for waiting in self.waiting:
            if waiting.late_s >= now_s:
                break  # calls are late about in the order in which they came
            waiting.overtaken += _overtakes(booking, waiting)

    def refused_again(self) -> bool:
        """The engine refused a call: whether it has done so before, and answered none since."""
        again, self._refuses = self._refuses, True
        return again

    def forgotten(self, now_s: float) -> list[Booking]:
        """The calls that the engine has forgotten."""
        return [b for b in self.waiting if b.overtaken >= OVERTAKEN_CALLS and b.late_s < now_s]

    def owes_since_s(self, now_s: float) -> float:
        """Since when the engine is silent although it has calls; now if it has none."""
        oldest = next(iter(self.waiting or self._streaming), None)
        return now_s if oldest is None else max(self.byte_s, oldest.sent_s)

    def sent_by(self, when_s: float) -> int:
        """How many of the calls that have not ended were sent by then."""
        return sum(booking.sent_s <= when_s for booking in (*self.waiting, *self._streaming))

    def leave(self, booking: Booking) -> None:
        """A call has ended, or has its first byte."""
        if booking in self.waiting:
            del self.waiting[booking]
            self._prefill_s -= booking.prefill_s
        self._streaming.pop(booking, None)

    def silent_s(self, now_s: float) -> float:
        """Seconds since the last byte."""
        return now_s - self.byte_s

    def is_hung(self, now_s: float) -> bool:
        """Whether the engine is silent although it owes bytes: a first byte is due, or a client waits for the next one.

        A stream whose client does not read is owed nothing.
        """
        if self.silent_s(now_s) <= self._hang_s:
            return False
        if self.waiting:
            running = max(1, SLOTS - len(self._streaming))
            return any(booking.due_s < now_s for booking in islice(self.waiting, running))
        return any(not booking.client_is_slow for booking in self._streaming)

    def is_stalled(self, now_s: float) -> bool:
        """Whether no stream goes on and no answer ends for longer than prompts and the streams' own pauses explain.

        New calls may have got their first bytes meanwhile. A stream whose client does not read is owed nothing.
        """
        began = {booking: booking.first_token_s or 0.0 for booking in self._streaming}
        older = [booking for booking, began_s in began.items() if now_s - began_s > 2 * STALL_S]
        if all(booking.client_is_slow for booking in older):
            return False
        since_s = max(self._answer_s, *(booking.byte_s for booking in older))
        prompts_s = sum(booking.prefill_s for booking, began_s in began.items() if began_s > since_s)
        pause_s = max(booking.pause_s for booking in older)
        return now_s - since_s > STALL_S + pause_s + prompts_s + self._prefill_s

    def check(self, bookings: int) -> None:
        """Assert the invariants for an engine with this many calls; for tests."""
        assert len(self.waiting) + len(self._streaming) == bookings
        assert abs(self._prefill_s - sum(booking.prefill_s for booking in self.waiting)) < 1e-6 or not self.waiting


def _overtakes(booking: Booking, waiting: Booking) -> bool:
    """Whether no scheduler has a reason to serve `booking` before `waiting`, which came first."""
    late, early = booking.call, waiting.call
    return (
        booking.sent_s > waiting.sent_s
        and late.streamed == early.streamed
        and (late.streamed or (late.output_limit or 0) >= (early.output_limit or inf))
        and 2 * booking.placement.missed_tokens >= waiting.placement.missed_tokens
        and late.priority >= early.priority
        and (late.slo, late.objective) == (early.slo, early.objective)
    )
