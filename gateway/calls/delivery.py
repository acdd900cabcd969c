"""A call in the gateway: one record of what is asked, where it is, and what came back."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import msgspec

from plait.backends.errors import EngineError, PlaitError
from plait.gateway.admission.backlog import Waiting
from plait.gateway.answers.completion_text import TextTap
from plait.gateway.answers.completions import COMPLETION, UNKNOWN, AnswerForm, UsageBounds
from plait.gateway.asgi import Headers, Nowhere, OnEnd, Sink
from plait.gateway.calls.outgoing import EngineBody
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.engine import Doubt
from plait.gateway.membership.engine_link import EngineLink
from plait.policy.types import Call

CLIENT_CLOSED = 499
"""The status of a call whose client went before its answer, as nginx has it."""


class HeldSink(Sink, Protocol):
    """The sink of a stream that has to wait. Once it `has_begun`, its client has a status."""

    has_begun: bool

    def tell(self, comment: str) -> None:
        """Tell the client that its call goes on."""

    def fail(self, error: PlaitError) -> None:
        """Tell a client that has a status of the error that ended its call."""


class HeldBytes(Protocol):
    """Where bytes count that are held for a call."""

    def hold(self, size_bytes: int) -> None:
        """Count this much more. Raises `PlaitError` beyond the limit."""

    def free(self, size_bytes: int) -> None:
        """Count this much less."""


class OpenExchange(Protocol):
    """The exchange with an engine, as long as there is one."""

    def close(self) -> None:
        """Give it up."""

    @property
    def has_last_event(self) -> bool:
        """Whether the client has the last event of a stream. Nothing may follow it."""

    def redirect(self, sink: Sink) -> None:
        """Nothing of the answer has come so far. From now on it goes to this sink."""


NOWHERE: Final = Nowhere()


class Delivery(msgspec.Struct, eq=False):
    """One call, from the last byte of its request to the end of its answer.

    Its maker sets what is asked, and the relay sets the rest. It is delivered once: a call that starts anew is a copy
    of a delivery that was not sent.
    """

    # What is asked.

    call: Call  # its objectives may change on its way, through `ChangedObjectives`
    path: str
    headers: Headers  # the client's
    body: EngineBody
    session: str | None = None  # of a program; a header of the answer repeats it
    text: TextTap | None = None  # reads the completion's text
    held: HeldBytes | None = None  # where an answer that is not streamed counts while it comes
    continues_on: str | None = None  # the engine that has most of the prompt in its cache
    avoids: frozenset[str] = frozenset()  # engines that get the call only if there is no other
    tenant: str = ""
    choices: int = 1  # completions in all
    bounds: UsageBounds = UNKNOWN  # the most tokens that it can use
    handle: str | None = None  # names a call whose objectives may change
    form: AnswerForm = COMPLETION
    route: str | None = None  # only engines that have this route may get it
    turn_of: str = ""  # the session that the client has named, in any way
    output: str | None = None  # the variable that the text becomes
    held_s: float | None = None  # the time until its inputs had values

    # Where it is.

    may_leave: bool = False  # it may be told to come back, if it has to wait
    held_stream: HeldSink | None = None  # becomes the sink of a stream whose client is told that it waits
    waiting: Waiting | None = None  # its place in admission, from the first attempt on
    booking: Booking | None = None  # of the attempt that is running or was the last
    link: EngineLink | None = None  # to that attempt's engine
    failures: tuple[tuple[str, EngineError], ...] = ()  # the engines of the attempts that failed, and how
    doubts: tuple[Doubt, ...] = ()  # failures that may be its own fault
    unable: frozenset[str] = frozenset()  # engines that never get it: they lack what it needs
    charged: bool = False  # a retry was taken from the budget
    sink: Sink = NOWHERE  # where its answer goes
    exchange: OpenExchange | None = None  # with the engine, while there is one
    timer: asyncio.Handle | None = None  # of a call that waits
    leasing: asyncio.Future[None] | None = None  # while the gateways' store is asked
    on_end: OnEnd | None = None  # called once, with the error that ended it

    # What came back.

    response_started: bool = False  # the client was sent something, so the call stays with this attempt
    ended: str | None = None  # `ok` or `refused`, once the engine has said all; the client may not have it yet
    usage: CallUsage | None = None
    usage_corrected: bool = False  # the engine's usage was out of bounds
    finish: str | None = None  # why the first choice ended
    engine_status: int = 200
    held_bytes: int = 0  # of an answer that is not streamed
    outcome: str = "client_gone"  # also `ok`, `refused`, `failed`, `no_engine`, and `defect`: the gateway's fault
    status: int = CLIENT_CLOSED  # what the client gets
    engine_id: str = ""  # where it ended
    problem: EngineError | str | None = None
    """None: the engine answered in full, with a text where one is read. An `EngineError`: the engine is at fault, so
    that another one may succeed. A text: what is wrong by the caller's fault."""

    @property
    def arrived_s(self) -> float:
        """The call's times count from here: its arrival, or when its inputs had values."""
        return self.call.arrived_s

    @property
    def failed_engines(self) -> frozenset[str]:
        """The engines of the attempts that failed."""
        return frozenset([engine_id for engine_id, _ in self.failures])

    def retry(self) -> None:
        """Another attempt follows. What came back of the one that failed is forgotten."""
        self.booking = self.ended = self.usage = self.finish = None
        self.usage_corrected = False


class CallWatch(Protocol):
    """Takes notice of calls on their way."""

    def placed(self, delivery: Delivery) -> None:
        """A call is sent to an engine, again after a failure."""

    def ended(self, delivery: Delivery, now_s: float) -> None:
        """A call has ended."""
