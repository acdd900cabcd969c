"""A call that was taken and is not sent yet."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from plait.backends.errors import PlaitError
from plait.gateway.fleet.booking import Booking
from plait.policy.admission.ticket import Rank, Ticket
from plait.policy.sessions.session_gate import SessionGate, Turn
from plait.policy.types import Call, Objective


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting(Ticket):
    """A call on its way to an engine, and how it may be placed: `prefer`, `avoid` and `route` as in `Router.select`.

    `output_tokens` are expected of it. `booking` is set while it is placed. It is to be sent once `is_sent`, or has
    failed with an `error`: then `tell` is called, unless it is sent at once. Its client has named a `session`, or that
    is empty. One that `passes` is never held for its session's sake. `turn` is what its model's `gate` knows it as.
    `before` calls of its tenant, with `before_s` of work, have waited for its model before it.
    """

    call: Call
    output_tokens: int = 0
    prefer: str | None = None
    avoid: Collection[str] = ()
    route: str | None = None
    booking: Booking | None = None
    is_sent: bool = False
    error: PlaitError | None = None
    tell: Callable[[], None] | None = None
    session: str = ""
    passes: bool = False
    gate: SessionGate | None = None
    turn: Turn | None = None
    before: int = 0
    before_s: float = 0.0

    @property
    def is_held(self) -> bool:
        """Whether its session waits for room in the engines' caches."""
        return self.turn is not None and self.turn.is_held

    @property
    def engine_id(self) -> str:
        """The engine that the call is placed on."""
        assert self.booking is not None
        return self.booking.placement.engine_id


def rank_of(call: Call) -> Rank:
    """The class of a call."""
    if call.objective is Objective.LATENCY or (call.slo is not None and call.slo.ttft_s is not None):
        return Rank.URGENT
    return Rank.THROUGHPUT if call.objective is Objective.THROUGHPUT else Rank.NORMAL
