"""A call's journey through the fleet: its attempts so far."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from plait.backends.errors import EngineError
from plait.gateway.admission.waiting import Waiting
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.exchange import Exchange

OnWait = Callable[[int, float], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Journey:
    """A call's attempts so far. `waiting` is set once it is to be placed.

    `on_wait` tells the client that its call waits: its place, and the expected seconds. One that `may_leave` is told to
    come back instead. `exchange` is the attempt that is running or was the last. `charged` is True once a retry was
    taken from the budget.
    """

    delivery: Delivery
    waiting: Waiting | None = None
    failures: list[tuple[str, EngineError]] = field(default_factory=list)
    exchange: Exchange | None = None
    charged: bool = False
    outcome: str = "client_gone"
    on_wait: OnWait | None = None
    may_leave: bool = False

    @property
    def avoids(self) -> frozenset[str]:
        """The engines that failed the call."""
        if not self.failures:
            return self.delivery.avoids
        return self.delivery.avoids.union(engine_id for engine_id, _ in self.failures)
