"""The state of a call: from the last byte of its request to the end of its answer.

A `Delivery` is in one of the states of `DELIVERY_TRANSITIONS`; docs/life_of_a_call.md has them as a diagram. A delivery
is made for what is asked (`Asked`), has at most one `Attempt` at a time, which is dropped whole before the next one,
and at its end an `Ending`. `Relay` carries out what its events ask for. Others change a delivery through its methods
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from plait.backends.errors import EngineError
from plait.gateway.asgi import OnEnd, Sink
from plait.gateway.calls.call import Asked, Attempt, Ending
from plait.gateway.calls.commented_sink import CommentedSink
from plait.gateway.calls.gate import Entry
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.policy.types import Call


class DeliveryState(StrEnum):
    READ = "read"
    """Its prompt is tokenized, and it is not placed."""

    WAITING = "waiting"
    """For room on its engine, for its session's turn, or for its tenant's rates."""

    SENT = "sent"
    """An engine has it. Its client has nothing of the answer, so that another engine can still get it."""

    STREAMING = "streaming"
    """The client was sent a part of the answer."""

    WRITTEN = "written"
    """All of the answer is written. The client may still have to read it."""

    PAUSED = "paused"
    """The only engine has failed it, and gets it again after a pause."""

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
    """A call was to enter a state that cannot follow its own. Nothing was changed."""


class Delivery(msgspec.Struct, eq=False):
    asked: Asked

    call: Call
    """The call that was asked for, with its objectives of now."""

    sink: Sink
    """Where the answer goes."""

    on_end: OnEnd | None
    """Called once when the call has ended, with its error or None. None: whoever waited for it has gone."""

    for_client: bool = True
    """Whether `on_end` tells the client. If not, others do."""

    state: DeliveryState = DeliveryState.READ

    entry: Entry | None = None
    """Its entry in admission, from the first placement on."""

    attempt: Attempt | None = None
    """The attempt that is running or was the last. A retry drops it."""

    failures: tuple[tuple[str, EngineError], ...] = ()
    """The engines of the attempts that failed, and how."""

    tried: tuple[tuple[Booking, str], ...] = ()
    """The attempts that failed, or were refused for what their engines lack, and why."""

    unable: frozenset[str] = frozenset()
    """Engines that never get the call: they lack what it needs."""

    charged: bool = False
    """Whether a retry was taken from the budget."""

    pause: asyncio.TimerHandle | None = None
    """Ends a pause before a retry."""

    commented: CommentedSink | None = None
    """Tells the client of a silent stream that its call goes on."""

    ending: Ending | None = None

    holdings: Iterator[Callable[[Delivery], None]] | None = None
    """The holdings that an ended call has not let go of yet."""

    defect: Exception | None = None
    """The first defect while it let go."""

    def enter(self, state: DeliveryState) -> None:
        """Change the state. Raises `CallTransitionError` for a step that is not in the table."""
        if state not in DELIVERY_TRANSITIONS[self.state]:
            raise CallTransitionError(f"call {self.call.call_id} is {self.state} and cannot become {state}")
        self.state = state

    def close(self) -> None:
        """The call is over. What refers back to it is dropped, so that nothing is left to the garbage collector."""
        self.on_end = self.defect = self.entry = self.attempt = self.holdings = None

    @property
    def is_told(self) -> bool:
        """Whether the client was sent something of an answer, so that the call stays with its attempt."""
        return self.state is DeliveryState.STREAMING or self.state is DeliveryState.WRITTEN

    @property
    def arrived_s(self) -> float:
        """The call's times count from here: its arrival, or when its inputs had values."""
        return self.call.arrived_s

    @property
    def usage(self) -> CallUsage | None:
        """The engine's token counts, at the end of its answer."""
        return None if self.attempt is None else self.attempt.answer.usage

    @property
    def latest_engine_id(self) -> str:
        return self.attempt.engine_id if self.attempt is not None else self.failures[-1][0] if self.failures else ""

    @property
    def is_retry(self) -> bool:
        """Whether the latest attempt came after another one."""
        return bool(self.tried) and (self.attempt is None or self.tried[0][0] is not self.attempt.booking)

    @property
    def failed_engines(self) -> frozenset[str]:
        return frozenset([engine_id for engine_id, _ in self.failures])

    def failed(self, booking: Booking, error: EngineError) -> None:
        self.failures += ((booking.placement.engine_id, error),)
        self.tried += ((booking, error.cause),)

    def untold(self, error: EngineError) -> EngineError | None:
        """The error, if an answer that has begun has no event to tell of it: its connection has to be closed."""
        return error if self.state is DeliveryState.STREAMING and not self.asked.form.has_events else None

    def refine(self, call: Call) -> None:
        self.call = call

    def redirect(self, sink: Sink) -> None:
        """Nothing of the answer has come so far. From now on it goes to this sink."""
        self.sink = sink
        if self.attempt is not None and self.attempt.exchange is not None:
            self.attempt.exchange.redirect(sink)


class CallWatch(Protocol):
    """Takes notice of calls on their way."""

    def placed(self, delivery: Delivery) -> None:
        """A call is sent to an engine, again after a failure."""

    def ended(self, delivery: Delivery) -> None:
        """A call has ended."""
