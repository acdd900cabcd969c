"""The doors by which guests come into the gateway. They are no interface for others: each release may change them.

A guest is a room in `gateway/guests` with one composing object, its `Guest`. The kernel knows none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from plait.gateway.api.call_api import Preparer, StepBefore
from plait.gateway.calls.records import Reader
from plait.gateway.calls.relay import Accompany, ToldBy
from plait.gateway.calls.routes import CallRoute
from plait.gateway.kernel import Kernel
from plait.gateway.others import Workers

T = TypeVar("T")


class StoreState:
    """What is known of the store. This class is for a gateway without one."""

    kind = ""
    """For operators."""

    @property
    def problem(self) -> str | None:
        """Why it cannot be written; None: it can."""
        return None


class Guest:
    """A part of the gateway that calls do without. Each door is shut unless a guest opens it.

    What it needs of other guests it takes from the `House`, when it is made or when it starts.
    """

    # Routes: those of calls with what makes calls of their requests, and those of its own.

    calls: Mapping[CallRoute, Preparer] = {}
    routes: Sequence[BaseRoute] = ()

    def around(self, rest: ASGIApp) -> ASGIApp:
        """What answers the routes that are no calls', around what answered them so far."""
        return rest

    def in_front(self, app: ASGIApp) -> ASGIApp:
        """What answers all requests, in front of what answered them so far."""
        return app

    # A step before a call, what goes with it to engines, a stage of its answer, a reader of its end.

    before: Sequence[StepBefore] = ()
    accompany: Accompany | None = None
    receipts: ToldBy | None = None
    readers: Sequence[Reader] = ()

    # What runs beside calls.

    def start(self) -> None:
        """Begin, with what all guests have offered. The guests begin in the reverse of their order."""

    async def until_ready(self) -> None:
        """Wait until requests may come. All guests have begun."""

    def begin_stop(self) -> None:
        """The gateway stops. Calls are still served."""

    def on_closed(self) -> None:
        """No more requests come."""

    async def stop(self) -> None:
        """End. The guests end in the reverse of their order, too."""


@dataclass(frozen=True, slots=True)
class House:
    """The kernel, and what its guests offer each other, by type.

    Gateways with the same `secret` derive the same from it. `save_to` is the file of `plait serve --save`, `workers`
    are the processes that serve the same clients; None: this one alone. They have one file of `accounts`; None: these
    are in `[store] url`, or in memory.
    """

    kernel: Kernel
    secret: bytes
    save_to: Path | None = None
    workers: Workers | None = None
    accounts: Path | None = None
    _offers: dict[type[Any], Any] = field(default_factory=dict)

    def offer(self, kind: type[T], thing: T) -> T:
        self._offers[kind] = thing
        return thing

    def find(self, kind: type[T]) -> T | None:
        """What a guest offers of this type; None: there is no such guest."""
        found: T | None = self._offers.get(kind)
        return found

    def __getitem__(self, kind: type[T]) -> T:
        """As `find`. Raises `LookupError` where there is no such guest."""
        found = self.find(kind)
        if found is None:
            raise LookupError(f"no guest offers {kind.__name__}")
        return found
