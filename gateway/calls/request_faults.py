"""Whose fault an engine's 5xx is: the engine's, or that of the request, which every engine fails alike.

While other calls succeed, a 5xx of an engine is only a doubt (`failed`), until another engine has had the call:

- another one answers, or fails in another way, or none is asked: the first has failed (`convict`);
- another one says the same: the request is at fault (`is_own`). Neither engine has failed, the client gets the answer
  as it is, and the same body is asked of one engine only for the next minutes;
- the client goes first: nothing is made of the failure (`forget`).

Where no call succeeds, engines are judged at once, because a sick fleet answers everybody alike. So is an engine that
has failed a call lately which another one answered.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

import structlog

from plait.backends.errors import EngineError, EngineStatusError
from plait.gateway.calls.delivery import Delivery
from plait.gateway.fleet.booking import Booking, Failure
from plait.gateway.fleet.engine import Doubt
from plait.gateway.fleet.health import HealthChange, HealthState
from plait.gateway.fleet.router import Router

NOT_SUPPORTED: Final = 501
"""The status of an engine that cannot do what is asked: no other engine of the model can."""

BUSY: Final = frozenset((429, 503))
"""Statuses of an engine that has too many calls. The calls that it has taken may go on."""

REMEMBERED_S: Final = 300.0
"""How long the body of a request at fault is known. An engine may be restarted or updated meanwhile."""

MOST_REMEMBERED: Final = 4_096
"""Bodies, by their hashes: some 0.5 MB."""

_CHANGING: Final = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", re.IGNORECASE)
"""Addresses, ids and times in a message, which differ between two engines that say the same."""

log = structlog.get_logger(__name__)


class RequestFaults:
    """Tells requests that are at fault from engines that are. `on_change` takes each change of an engine's health."""

    def __init__(self, router: Router, on_change: Callable[[HealthChange], None]) -> None:
        self._router = router
        self._on_change = on_change
        self._doubts: dict[Delivery, list[Doubt]] = {}
        self._remembered: OrderedDict[bytes, float] = OrderedDict()

    def failed(self, delivery: Delivery, booking: Booking, error: EngineError, now_s: float) -> HealthChange | None:
        """An engine has failed a call: it is judged, or doubted. Returns the change of its health, if any."""
        router, failure = self._router, _failure(error)
        engine = router.engines[booking.placement.engine_id]
        if (
            not isinstance(error, EngineStatusError)
            or not _may_be_own(error.status)
            or engine.health.state is not HealthState.UP
            or not router.health.serves(booking.call.model, now_s)
        ):
            return router.fail(booking, failure, now_s)
        router.fail(booking, None, now_s)
        doubt = Doubt(engine, booking, failure, _same((error.status, error.said)))
        self._doubts.setdefault(delivery, []).append(doubt)
        router.health.doubt(engine)
        return None

    def is_own(self, delivery: Delivery, engine_id: str, said: tuple[int, str], now_s: float) -> bool:
        """Whether an engine's answer, its status and message, is the request's own fault."""
        engine = self._router.engines[engine_id]
        if not _may_be_own(said[0]) or engine.health.state is not HealthState.UP:
            return False
        alike = [doubt.engine for doubt in self._doubts.get(delivery, ()) if doubt.said == _same(said)]
        others = {one.view.engine_id for one in alike if one.health.state is HealthState.UP} - {engine_id}
        if others:
            self._remember(delivery, now_s)
            log.info(
                "request at fault",
                request_id=delivery.call.call_id,
                status=said[0],
                engines=sorted({*others, engine_id}),
            )
            self.forget(delivery)
            return True
        return self._knows(delivery, now_s) and self._router.health.serves(delivery.call.model, now_s)

    def convict(self, delivery: Delivery, now_s: float) -> None:
        router = self._router
        for doubt in self.forget(delivery):
            if router.engines.get(doubt.engine.view.engine_id) is not doubt.engine:
                continue  # it has left the fleet
            change = router.health.failed(doubt.engine, doubt.booking, doubt.failure, now_s)
            if change is not None:
                self._on_change(change)

    def unresolved(self, delivery: Delivery, now_s: float, *, client_gone: bool) -> None:
        """The call has ended without another engine's answer."""
        if client_gone:
            self.forget(delivery)
        else:
            self.convict(delivery, now_s)

    def forget(self, delivery: Delivery) -> Sequence[Doubt]:
        """Nothing is made of a call's failures: it is at fault, or its client did not wait for another engine.

        Returns what they were.
        """
        doubts = self._doubts.pop(delivery, ()) if self._doubts else ()
        for doubt in doubts:
            self._router.health.no_doubt(doubt.engine)
        return doubts

    def _remember(self, delivery: Delivery, now_s: float) -> None:
        key = _hash(delivery)
        self._remembered[key] = now_s + REMEMBERED_S
        self._remembered.move_to_end(key)
        if len(self._remembered) > MOST_REMEMBERED:
            self._remembered.popitem(last=False)

    def _knows(self, delivery: Delivery, now_s: float) -> bool:
        return bool(self._remembered) and self._remembered.get(_hash(delivery), 0.0) > now_s


def _failure(error: EngineError) -> Failure:
    is_busy = isinstance(error, EngineStatusError) and error.status in BUSY
    return Failure(error.cause, not is_busy, error.retry_after_s, error.message)


def _may_be_own(status: int) -> bool:
    return status >= 500 and status not in BUSY


def _same(said: tuple[int, str]) -> tuple[int, str]:
    return said[0], _CHANGING.sub("#", said[1])


def _hash(delivery: Delivery) -> bytes:
    route = delivery.asked.path.encode()
    return blake2b(delivery.asked.body.original, digest_size=16, key=blake2b(route, digest_size=16).digest()).digest()
