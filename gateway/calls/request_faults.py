"""Decides who is at fault for a failure that a request can cause: a 5xx, or an answer that is garbled or broken.

While other calls of the model succeed, such a failure is only a `Doubt` about the engine (`failed`). It is decided:

- another engine answers the call: the first engine has failed (`convict`);
- another engine fails the same body alike, or the same engine fails it a third time while it answers others: the
  request is at fault (`is_own`). Both engines are cleared, the client gets the error, and for `REMEMBERED_S` the same
  body is not retried;
- the client disconnects first: the doubt is dropped (`forget`).

A call may end before that (`unresolved`): a stream that has begun is not retried. Its doubts are then kept until the
same body shows whose fault it was, also in another call, or until the engine fails another body: then the engine has
failed both, unless another engine fails others' bodies alike.

While no call of the model succeeds, a failure counts as the engine's at once, because a sick fleet fails every request
alike. The same holds for an engine that is not `UP`, such as a suspect.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

import structlog

from plait.backends.errors import EngineBrokenError, EngineError, EngineGarbledError, EngineStatusError
from plait.gateway.calls.delivery import Delivery
from plait.gateway.fleet.booking import Booking, Failure
from plait.gateway.fleet.engine import Doubt, FleetEngine
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

ALIKE_BEFORE: Final = 2
"""So many failures of a body by an engine, and a third one, are the body's fault if the engine answers others."""

_CHANGING: Final = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", re.IGNORECASE)
"""Addresses, ids and times in a message, which differ between two engines that say the same."""

log = structlog.get_logger(__name__)


class RequestFaults:
    """The doubts about engines, by call, and the bodies at fault. `on_change` gets changes of engines' health."""

    def __init__(self, router: Router, on_change: Callable[[HealthChange], None]) -> None:
        self._router = router
        self._on_change = on_change
        self.doubts: dict[Delivery, list[Doubt]] = {}
        self.undecided: dict[FleetEngine, tuple[bytes, list[Doubt]]] = {}  # of calls that have ended, one body each
        self._remembered: OrderedDict[bytes, float] = OrderedDict()

    def failed(self, delivery: Delivery, booking: Booking, error: EngineError, now_s: float) -> HealthChange | None:
        """An engine has failed a call: record a failure or a doubt. Returns the change of its health, if any."""
        router, failure = self._router, _failure(error)
        engine = router.engines[booking.placement.engine_id]
        said = _said(error, engine.view.engine_id)
        if (
            said is None
            or engine.health.state is not HealthState.UP
            or not router.health.serves(booking.call.model, now_s)
        ):
            return router.fail(booking, failure, now_s)
        router.fail(booking, None, now_s)
        error.is_requests = self.is_own(delivery, engine.view.engine_id, said, now_s)
        if not error.is_requests:
            self.doubts.setdefault(delivery, []).append(Doubt(engine, booking, failure, said))
            router.health.doubt(engine)
        return None

    def is_own(self, delivery: Delivery, engine_id: str, said: str | None, now_s: float) -> bool:
        """Whether the request is at fault for an engine's answer. `said`: see `Doubt`; None: it never is."""
        engine = self._router.engines[engine_id]
        if said is None or engine.health.state is not HealthState.UP:
            return False
        key = _hash(delivery) if self.undecided else b""
        earlier = [doubt for one, doubts in self.undecided.values() if one == key for doubt in doubts]
        alike = [doubt.engine for doubt in (*self.doubts.get(delivery, ()), *earlier) if doubt.said == said]
        others = {one.view.engine_id for one in alike if one.health.state is HealthState.UP} - {engine_id}
        if others or (alike.count(engine) >= ALIKE_BEFORE and _answers_others(engine, now_s)):
            self._remember(delivery, now_s)
            log.info("request at fault", request_id=delivery.call.call_id, engines=sorted({*others, engine_id}))
            self.undecided = {engine: kept for engine, kept in self.undecided.items() if kept[0] != key}
            self.forget(delivery)
            return True
        return self._knows(delivery, now_s) and self._router.health.serves(delivery.call.model, now_s)

    def convict(self, delivery: Delivery, now_s: float) -> None:
        """Turn the call's doubts into failures of their engines."""
        self._convict(self.forget(delivery), now_s)

    def answered(self, delivery: Delivery, now_s: float) -> None:
        """The call has its whole answer, so engines that failed its body in earlier calls were at fault."""
        key = _hash(delivery)
        for engine in [engine for engine, kept in self.undecided.items() if kept[0] == key]:
            self._convict(self.undecided.pop(engine)[1], now_s)

    def _convict(self, doubts: Sequence[Doubt], now_s: float) -> None:
        router = self._router
        for doubt in doubts:
            if router.engines.get(doubt.engine.view.engine_id) is not doubt.engine:
                continue  # it has left the fleet
            change = router.health.failed(doubt.engine, doubt.booking, doubt.failure, now_s)
            if change is not None:
                self._on_change(change)

    def unresolved(self, delivery: Delivery, now_s: float, *, client_gone: bool) -> None:
        """The call has ended before another engine's answer has decided its doubts."""
        doubts = self.forget(delivery)
        for doubt in () if client_gone else doubts:
            engine, key = doubt.engine, _hash(delivery)
            before, kept = self.undecided.pop(engine, (key, []))
            if before == key or (self._fail_alike(doubt) and _answers_others(engine, now_s)):
                self.undecided[engine] = key, [*(kept if before == key else ()), doubt][-ALIKE_BEFORE:]
            else:
                self._convict([*kept, doubt], now_s)

    def _fail_alike(self, doubt: Doubt) -> bool:
        """Whether another engine fails other bodies alike: then none of the two is sicker than the other."""
        others = [kept for engine, (_, kept) in self.undecided.items() if engine is not doubt.engine]
        return any(one.said == doubt.said for kept in others for one in kept)

    def forget(self, delivery: Delivery) -> Sequence[Doubt]:
        """Drop the call's doubts, and return them."""
        doubts = self.doubts.pop(delivery, ())
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


def status_said(status: int, said: str) -> str | None:
    """What an answer with this status and message says; None for one that no request causes."""
    return _CHANGING.sub("#", f"{status} {said}") if _may_be_own(status) else None


def _said(error: EngineError, engine_id: str) -> str | None:
    """What a failure says; None for one that no request causes."""
    if isinstance(error, EngineStatusError):
        return status_said(error.status, error.said) if error.cause == f"status_{error.status}" else None
    if not isinstance(error, EngineGarbledError | EngineBrokenError):
        return None
    return _CHANGING.sub("#", f"{error.cause} {error.message.replace(f'engine {engine_id} ', '')}")


def _answers_others(engine: FleetEngine, now_s: float) -> bool:
    return now_s - engine.health.succeeded_s <= engine.health.limits.window_s


def _hash(delivery: Delivery) -> bytes:
    route = delivery.asked.path.encode()
    return blake2b(delivery.asked.body.original, digest_size=16, key=blake2b(route, digest_size=16).digest()).digest()
