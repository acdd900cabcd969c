"""The holdings of a call in the gateway beside its attempt. An ended call lets go of them in one order."""

from __future__ import annotations

import structlog

from plait.backends.errors import PlaitError
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.delivery import CallWatch, Delivery
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.request_faults import RequestFaults
from plait.gateway.calls.silent_streams import SilentStreams
from plait.gateway.fleet.router import RetryBudgets
from plait.gateway.timer import loop_time_s

log = structlog.get_logger(__name__)


class Holdings:
    """Lets go of what ended calls hold, in `order`. A `watch` takes notice of each call."""

    def __init__(
        self,
        gate: Gate,
        metrics: CallMetrics,
        *,
        silent_streams: SilentStreams,
        objectives: ChangedObjectives,
        faults: RequestFaults,
        retries: RetryBudgets,
    ) -> None:
        self.watch: CallWatch | None = None
        self._silent_streams = silent_streams
        self._objectives = objectives
        self._faults = faults
        self._gate = gate
        self._retries = retries
        self._metrics = metrics
        self.order = (
            self._leave_streams,
            self._leave_objectives,
            self._leave_doubts,
            self._leave_admission,
            self._leave_retries,
            self._count,
            self._log,
            self._leave_watch,
        )

    def _leave_streams(self, delivery: Delivery) -> None:
        if delivery.commented is not None:
            self._silent_streams.end(delivery)

    def _leave_objectives(self, delivery: Delivery) -> None:
        if delivery.asked.handle is not None:
            self._objectives.end(delivery)

    def _leave_doubts(self, delivery: Delivery) -> None:
        """Judge the engines that have failed the call and of which no other engine has shown anything."""
        assert delivery.ending is not None
        self._faults.unresolved(delivery, loop_time_s(), client_gone=delivery.ending.outcome == "client_gone")

    def _leave_admission(self, delivery: Delivery) -> None:
        if delivery.entry is not None:
            usage = delivery.usage
            self._gate.left(delivery.entry, None if usage is None else usage.prompt_tokens + usage.output_tokens)

    def _leave_retries(self, delivery: Delivery) -> None:
        if delivery.charged:
            self._retries.give_back(delivery.call.model)

    def _count(self, delivery: Delivery) -> None:
        self._metrics.ended(delivery, loop_time_s())

    def _log(self, delivery: Delivery) -> None:
        _write_line(delivery, self._metrics.tenant_label(delivery.asked.tenant), loop_time_s())

    def _leave_watch(self, delivery: Delivery) -> None:
        if self.watch is not None:
            self.watch.ended(delivery, loop_time_s())


def tell(delivery: Delivery) -> None:
    """Tell the client whose stream has a status, or else whoever began the call. Raises a defect if nobody is left.

    No effect the second time.
    """
    ending, on_end, commented, defect = delivery.ending, delivery.on_end, delivery.commented, delivery.defect
    assert ending is not None
    error: BaseException | None = defect or ending.error
    delivery.close()
    try:
        if isinstance(error, PlaitError) and on_end is not None and commented is not None and commented.has_begun:
            told, error = error, None
            commented.fail(told)
    finally:
        if on_end is not None:
            on_end(error)
    if on_end is None and defect is not None:
        raise defect


def _write_line(delivery: Delivery, tenant: str, now_s: float) -> None:
    """Write the line of a call that has ended. `tenant` is the tenant as operators read it. Times are in seconds."""
    asked, call, attempt, ending = delivery.asked, delivery.call, delivery.attempt, delivery.ending
    assert ending is not None
    usage, arrived_s = delivery.usage, delivery.arrived_s
    booking = None if attempt is None else attempt.booking
    placement, first_s = (None, None) if booking is None else (booking.placement, booking.first_token_s)
    tpot_s = None  # the mean time of a token after the first, where they were timed
    if usage is not None and first_s is not None and usage.output_tokens > 1:
        tpot_s = round((now_s - first_s) / (usage.output_tokens - 1), 5)
    log.bind().info(  # `log.info` would raise an AttributeError and catch it, in each call
        "call",
        request_id=call.call_id,
        path=asked.path,
        status=ending.status,
        stream=call.streamed,
        tenant=tenant,
        model=call.model,
        session=asked.session,
        output=asked.output,
        engine=placement and placement.engine_id,
        placement=placement and placement.reason,
        objective=call.objective,
        slo_at_risk=(placement and placement.meets_slo is False) or None,
        group=call.group and call.group.group_id.replace(asked.tenant, tenant, 1),
        outcome=ending.outcome,
        finish_reason=attempt and attempt.answer.finish,
        failed_on=_failed_on(delivery) if delivery.failures else None,
        prompt_tokens=call.prompt_tokens,
        predicted_cached_tokens=placement and placement.cached_tokens,
        cached_tokens=usage and usage.cached_tokens,
        output_tokens=usage and usage.output_tokens,
        held_s=asked.inputs_s and round(asked.inputs_s, 4),
        placed_s=booking and round(booking.booked_s - arrived_s, 4),
        waited_s=booking and round(booking.sent_s - arrived_s, 4),
        waited_for=delivery.entry and delivery.entry.waiting.waits and delivery.entry.waiting.waited_for(now_s),
        ttft_s=first_s and round(first_s - arrived_s, 4),
        tpot_s=tpot_s,
        e2e_s=round(now_s - arrived_s, 4),
    )


def _failed_on(delivery: Delivery) -> list[str]:
    return [f"{engine_id}: {error.cause}" for engine_id, error in delivery.failures]
