"""Decides who is at fault for an engine's 5xx: the engine, or the request, which every engine fails alike.

While other calls of the model succeed, a 5xx is only a `Doubt` about the engine (`failed`). The retry decides it:

- another engine answers or fails differently, or there is no retry: the first engine has failed (`convict`);
- another engine fails with the same status and message: the request is at fault (`is_own`). Both engines are cleared,
  the client gets the error as it is, and for `REMEMBERED_S` the same body is not retried;
- the client disconnects first: the doubt is dropped (`forget`).

While no call of the model succeeds, a 5xx counts as the engine's failure at once, because a sick fleet fails every
request alike. The same holds for an engine that is not `UP`, such as a suspect.
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
"""Statuses of an overloaded engine. The calls that it has accepted may still run."""

REMEMBERED_S: Final = 300.0
"""How long the body of a request at fault is remembered. Not for ever: an updated engine may serve it."""

MOST_REMEMBERED: Final = 4_096
"""Bodies, by their hashes: some 0.5 MB."""

_CHANGING: Final = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", re.IGNORECASE)
"""Addresses, ids and times in a message, which differ between two engines that say the same."""

log = structlog.get_logger(__name__)


class RequestFaults:
    """The doubts about engines, by call, and the bodies at fault. `on_change` gets changes of engines' health."""

    def __init__(self, router: Router, on_change: Callable[[HealthChange], None]) -> None:
        self._router = router
        self._on_change = on_change
        self._doubts: dict[Delivery, list[Doubt]] = {}
        self._remembered: OrderedDict[bytes, float] = OrderedDict()

    def failed(self, delivery: Delivery, booking: Booking, error: EngineError, now_s: float) -> HealthChange | None:
        """An engine has failed a call: record a failure or a doubt. Returns the change of its health, if any."""
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
        """Whether the request is at fault for an engine's answer. `said` is its status and message."""
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
        """Turn the call's doubts into failures of their engines."""
        router = self._router
        for doubt in self.forget(delivery):
            if router.engines.get(doubt.engine.view.engine_id) is not doubt.engine:
                continue  # it has left the fleet
            change = router.health.failed(doubt.engine, doubt.booking, doubt.failure, now_s)
            if change is not None:
                self._on_change(change)

    def unresolved(self, delivery: Delivery, now_s: float, *, client_gone: bool) -> None:
        """The call has ended before another engine's answer has decided its doubts."""
        if client_gone:
            self.forget(delivery)
        else:
            self.convict(delivery, now_s)

    def forget(self, delivery: Delivery) -> Sequence[Doubt]:
        """Drop the call's doubts, and return them."""
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
