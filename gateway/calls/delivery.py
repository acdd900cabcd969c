"""The state of a call, from the last byte of its request to the end of its answer.

A `Delivery` is a state machine: `DELIVERY_TRANSITIONS` is its table, docs/life_of_a_call.md has the diagram. A delivery
begins with the request (`Asked`), has at most one `Attempt` at a time (a retry replaces it), and ends with an `Ending`.
`Relay` handles a delivery's events and owns its fields. Other modules change a delivery only through its methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import StrEnum
from typing import Final, Protocol, TypeVar

import msgspec

from plait.backends.errors import EngineError, PlaitError
from plait.backends.http.body import Body
from plait.gateway.asgi import Headers, OnEnd, Sink
from plait.gateway.calls.call import Asked, Attempt, Ending
from plait.gateway.calls.commented_sink import CommentedSink
from plait.gateway.calls.gate import Entry
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.policy.types import Call

ErrorT = TypeVar("ErrorT", bound=PlaitError)


class DeliveryState(StrEnum):
    READ = "read"
    """The prompt is tokenized. No engine is chosen yet."""

    WAITING = "waiting"
    """In admission: for room on its engine, for its session's turn, or for its tenant's rates."""

    SENT = "sent"
    """An engine has the call. The client has no byte of the answer, so another engine can still get the call."""

    STREAMING = "streaming"
    """The client was sent a part of the answer, so the call cannot move to another engine."""

    WRITTEN = "written"
    """The sink has the whole answer. The client may still be reading it."""

    PAUSED = "paused"
    """Every engine that could take the call has failed it. One of them gets it again after a pause."""

    ENDED = "ended"


DELIVERY_TRANSITIONS: Final[dict[DeliveryState, frozenset[DeliveryState]]] = {
    DeliveryState.READ: frozenset((DeliveryState.WAITING, DeliveryState.SENT, DeliveryState.ENDED)),
    DeliveryState.WAITING: frozenset((DeliveryState.SENT, DeliveryState.ENDED)),
    DeliveryState.SENT: frozenset(
        (
            DeliveryState.SENT,  # a retry on another engine
            DeliveryState.STREAMING,
            DeliveryState.WRITTEN,
            DeliveryState.PAUSED,
            DeliveryState.ENDED,
        )
    ),
    DeliveryState.STREAMING: frozenset((DeliveryState.WRITTEN, DeliveryState.ENDED)),
    DeliveryState.WRITTEN: frozenset((DeliveryState.ENDED,)),
    DeliveryState.PAUSED: frozenset((DeliveryState.SENT, DeliveryState.ENDED)),
    DeliveryState.ENDED: frozenset(),
}


class CallTransitionError(RuntimeError):
    """A transition that `DELIVERY_TRANSITIONS` does not have. The state is unchanged."""


class Companion:
    """What a guest has to do with one call, from its beginning to its end. By default: nothing."""

    def enter(self) -> Awaitable[None] | None:
        """Called before the call is placed: what it has to wait for first; None: nothing.

        Raises `PlaitError` for a call that may not run, and so does what is waited for.
        """

    def stage(self, sink: Sink) -> Sink:
        """What the answer goes through on its way to this sink."""
        return sink

    def sent(self, headers: Headers, body: Body, delivery: Delivery) -> tuple[Headers, Body]:  # noqa: ARG002
        """Headers and body of the next attempt, of those that the engine would get."""
        return headers, body

    def ended(self, delivery: Delivery) -> None:
        """The call has ended: `delivery.ending` is set, and the other fields are still there."""

    def undone(self) -> None:
        """The call is delivered again, with other companions: this delivery is of no account."""


class Delivery(msgspec.Struct, eq=False):
    asked: Asked
    """The call as the client wants it."""

    call: Call
    """`asked.call` with its current objectives."""

    sink: Sink
    """Writes the answer to the client."""

    on_end: OnEnd | None
    """Called once when the call has ended, with its error or None. None: nobody waits for the call any more."""

    for_client: bool = True
    """Whether `on_end` answers the client. False for calls of programs, whose clients get answers from elsewhere."""

    companions: tuple[Companion, ...] = ()
    """Those of guests."""

    one_by_one: bool = False
    """Whether each event of a stream is passed on by itself, as a companion wants it."""

    state: DeliveryState = DeliveryState.READ

    entry: Entry | None = None
    """The call's entry in admission, from its first placement on."""

    attempt: Attempt | None = None
    """The running or last attempt."""

    failures: tuple[tuple[str, EngineError], ...] = ()
    """The engine id and the error of each failed attempt."""

    tried: tuple[tuple[Booking, str], ...] = ()
    """The booking and the cause of each attempt that failed or that the engine refused for a `Lack`."""

    unable: frozenset[str] = frozenset()
    """Engines that never get the call: they lack its model or a long enough context."""

    refused: dict[str, dict[str, Sequence[str]]] = {}
    """`RefusedFields` of each engine that has refused the call for them."""

    charged: bool = False
    """Whether a retry was charged to the model's retry budget."""

    pause: asyncio.TimerHandle | None = None
    """The timer that ends the pause before a retry."""

    commented: CommentedSink | None = None
    """Sends keep-alive comments to the client of a silent stream."""

    ending: Ending | None = None
    """How the call ended. None until then."""

    holdings: Iterator[Callable[[Delivery], None]] | None = None
    """The cleanup steps (`Holdings`) that have not run yet. Set when the call ends."""

    defect: Exception | None = None
    """The first exception that a cleanup step raised."""

    def enter(self, state: DeliveryState) -> None:
        """Change the state. Raises `CallTransitionError`."""
        if state not in DELIVERY_TRANSITIONS[self.state]:
            raise CallTransitionError(f"call {self.call.call_id} is {self.state} and cannot become {state}")
        self.state = state

    def close(self) -> None:
        """Break the reference cycles, so that reference counting frees the call without the garbage collector."""
        self.on_end = self.defect = self.entry = self.attempt = self.holdings = None

    @property
    def is_told(self) -> bool:
        """Whether the client got any part of an answer. If so, the call is never retried."""
        return self.state is DeliveryState.STREAMING or self.state is DeliveryState.WRITTEN

    @property
    def arrived_s(self) -> float:
        """The zero of the call's times: its arrival, or when its inputs had values."""
        return self.call.arrived_s

    @property
    def usage(self) -> CallUsage | None:
        """The token counts that the engine of the last attempt reported."""
        return None if self.attempt is None else self.attempt.answer.usage

    @property
    def latest_engine_id(self) -> str:
        return self.attempt.engine_id if self.attempt is not None else self.failures[-1][0] if self.failures else ""

    @property
    def is_retry(self) -> bool:
        """Whether the last attempt was not the first."""
        return bool(self.tried) and (self.attempt is None or self.tried[0][0] is not self.attempt.booking)

    @property
    def failed_engines(self) -> frozenset[str]:
        return frozenset([engine_id for engine_id, _ in self.failures])

    def failed(self, booking: Booking, error: EngineError) -> None:
        self.failures += ((booking.placement.engine_id, error),)
        self.tried += ((booking, error.cause),)

    def waited_for(self) -> dict[str, float] | None:
        """The seconds that the ended call has waited, by reason; None if it has not waited."""
        assert self.ending is not None
        named = {} if self.entry is None else self.entry.waiting.waited_for(self.ending.ended_s) or {}
        return named | ({"gateway": round(self.ending.gateway_s, 3)} if self.ending.gateway_s else {}) or None

    def untold(self, error: ErrorT) -> ErrorT | None:
        """The error, if the answer has begun and its form has no error event: then the connection has to be closed."""
        return error if self.state is DeliveryState.STREAMING and not self.asked.form.has_events else None

    def refine(self, call: Call) -> None:
        self.call = call

    def redirect(self, sink: Sink) -> None:
        """Send the answer to this sink instead. Only before its first byte."""
        self.sink = sink
        if self.attempt is not None and self.attempt.exchange is not None:
            self.attempt.exchange.redirect(sink)


class CallWatch(Protocol):
    """Observes calls, for the live view."""

    def placed(self, delivery: Delivery) -> None:
        """Called for each attempt, before it is sent."""

    def ended(self, delivery: Delivery) -> None: ...
