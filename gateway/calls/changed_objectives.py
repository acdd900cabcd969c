"""Changes the objectives of running calls, and sends the changes to their engines.

The gateway's bookings change at once. A background task sends the change to the engine by `POST /call_objectives`. Each
engine gets one request at a time, with the newest objectives of each call that has changed since the last request. A
request that fails is not repeated: the calls then run with the objectives that they were sent with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from itertools import islice

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from plait.backends.errors import EngineError
from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.backends.protocol.call_objectives import MAX_CHANGES, PATH, ChangesAnswer, encode_changes
from plait.gateway.admission.admission import Admission
from plait.gateway.calls.delivery import Delivery
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import EngineLink
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import loop_time_s
from plait.policy.types import NO_SLO, Call

ANSWER_DEADLINE_S = 5.0
"""An engine answers between two iterations. A change that is older than this is of little use."""

MAX_ANSWER_BYTES = 4_096

log = structlog.get_logger(__name__)


class ChangedObjectives:
    """The running calls whose objectives may change (by handle), and the changes not sent to engines yet."""

    def __init__(
        self,
        router: Router,
        admission: Admission,
        links: Mapping[str, EngineLink],
        supervisor: Supervisor,
        registry: CollectorRegistry,
    ) -> None:
        self._router = router
        self._admission = admission
        self._links = links
        self._supervisor = supervisor
        self._counter = Counter(
            "plait_changed_objectives",
            "Changed objectives of calls on an engine, by whether its scheduler knows of the change",
            ["engine", "told"],
            registry=registry,
        )
        self._deliveries: dict[str, Delivery] = {}
        self._untold: dict[str, dict[str, Call]] = {}  # by engine and handle: the changes to send

    def begin(self, delivery: Delivery) -> None:
        """Accept changes of the call's objectives until `end`. The call must have a handle."""
        assert delivery.asked.slot.handle is not None
        self._deliveries[delivery.asked.slot.handle] = delivery

    def end(self, delivery: Delivery) -> None:
        """Accept no more changes. No effect if another delivery with the same handle has ended meanwhile."""
        assert delivery.asked.slot.handle is not None
        self._deliveries.pop(delivery.asked.slot.handle, None)

    def change(self, handle: str, call: Call) -> None:
        """Give the call with this handle the objectives of `call`.

        The change has no effect unless the call with this handle is being delivered.
        """
        delivery = self._deliveries.get(handle)
        if delivery is None:
            return
        before, attempt = delivery.call, delivery.attempt
        delivery.refine(call)
        if attempt is None and delivery.entry is not None:
            self._admission.refine(delivery.entry.waiting, call, loop_time_s())
        if attempt is None or attempt.answer.outcome is not None:
            return
        self._router.refine(attempt.booking, call, loop_time_s())
        if (before.slo or NO_SLO, before.objective) != (call.slo or NO_SLO, call.objective):
            self._tell(attempt.engine_id, handle, call)

    def _tell(self, engine_id: str, handle: str, call: Call) -> None:
        report = self._router.engines[engine_id].cache.last_report
        if report is None or not report.scheduler.takes_objectives:
            self._count(engine_id, told=0, untold=1)
            return
        untold = self._untold.get(engine_id)
        if untold is None:
            untold = self._untold[engine_id] = {}
            self._supervisor.start(f"objectives:{engine_id}", partial(self._send_all, engine_id))
        untold[handle] = call

    async def _send_all(self, engine_id: str) -> None:
        """Send the engine's changes, one request after the other.

        asyncio starts the task only after the callback that made the first change. So all changes of that callback go
        in one request.
        """
        untold = self._untold.get(engine_id, {})
        try:
            while untold:
                batch = {handle: untold.pop(handle) for handle in tuple(islice(untold, MAX_CHANGES))}
                batch = {handle: call for handle, call in batch.items() if handle in self._deliveries}
                if batch:
                    known = await self._sent(engine_id, batch)
                    self._count(engine_id, told=known, untold=len(batch) - known)
        finally:
            self._untold.pop(engine_id, None)

    async def _sent(self, engine_id: str, batch: Mapping[str, Call]) -> int:
        """Send one request. Returns how many of the calls the engine knows; 0 if the engine does not answer."""
        link = self._links.get(engine_id)
        if link is None:
            return 0
        headers = [(b"content-type", b"application/json"), *link.rank]
        if link.authorization is not None:
            headers.append((b"authorization", link.authorization))
        changes = [
            EngineAnnotations(slo=call.slo, objective=call.objective, handle=handle) for handle, call in batch.items()
        ]
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                response = await link.client.request("POST", PATH, headers, encode_changes(changes))
                try:
                    answer = await response.read(MAX_ANSWER_BYTES)
                finally:
                    response.abort()
            known = msgspec.json.decode(answer, type=ChangesAnswer).known if response.status == 200 else 0
        except (EngineError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.debug("engine was not told of changed objectives", engine=engine_id, error=str(error) or repr(error))
            return 0
        return min(max(0, known), len(batch))

    def _count(self, engine_id: str, *, told: int, untold: int) -> None:
        for value, label in ((told, "yes"), (untold, "no")):
            if value:
                self._counter.labels(engine_id, label).inc(value)
