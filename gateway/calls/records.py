"""The records of ended requests: each goes exactly once to every `Reader` (metrics, the log, a store).

`Holdings` calls `Reader.ended` for a call. A request on a call's route that was refused before it became a call has no
`Delivery`: `Reader.no_call` gets its `Ending`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from plait.backends.errors import NoEngineError, PlaitError
from plait.gateway.asgi import ClientGoneError
from plait.gateway.calls.call import CLIENT_CLOSED, DEFECT, Ending, Outcome
from plait.gateway.calls.delivery import Delivery
from plait.gateway.timer import loop_time_s
from plait.policy.types import NO_MARGIN

log = structlog.get_logger(__name__)


class Reader(Protocol):
    def ended(self, delivery: Delivery) -> None:
        """Record an ended call: `delivery.ending` is set, and the other fields are still there."""

    def no_call(self, ending: Ending) -> None:
        """Record a request that was refused before it became a call, or got the answer of another request's call."""


class CallRecords:
    """All `readers`, in the order in which they read."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self.readers = tuple(readers)

    def no_call(self, ending: Ending) -> None:
        for reader in self.readers:
            reader.no_call(ending)


def refused(
    request_id: str,
    path: str,
    tenant: str,
    model: str,
    *,
    arrived_s: float,
    error: BaseException | None,
    status: int | None = None,
) -> Ending:
    """The ending of a request that was no call of its own: by an error, or with another request's answer.

    `status` is that of the answer; None: the error's, or 200. An `error` other than `PlaitError` or
    `ClientGoneError` is a defect.
    """
    outcome: Outcome = "refused"
    code, message = None, None
    if error is None:
        status = status or 200
        outcome = "ok" if status < 400 else "refused"
    elif isinstance(error, ClientGoneError):
        outcome, status = "client_gone", CLIENT_CLOSED
    elif isinstance(error, PlaitError):
        outcome = "no_engine" if isinstance(error, NoEngineError) else "refused"
        status, code, message = status or error.status, error.shown_code, error.logged_message
    else:
        outcome, status, code = "defect", 500, DEFECT
    return Ending(
        outcome,
        status,
        error=error,
        request_id=request_id,
        path=path,
        tenant=tenant,
        model=model,
        code=code,
        message=message,
        arrived_s=arrived_s,
        ended_s=loop_time_s(),
    )


class CallLog:
    """Logs one line for each ended request. `tenant_label` turns a tenant into the name that operators see."""

    def __init__(self, tenant_label: Callable[[str], str]) -> None:
        self._tenant_label = tenant_label

    def no_call(self, ending: Ending) -> None:
        log.info(
            "call",
            request_id=ending.request_id,
            path=ending.path,
            status=ending.status,
            code=ending.code,
            message=ending.message,
            tenant=self._tenant_label(ending.tenant),
            model=ending.model,
            outcome=ending.outcome,
            e2e_s=round(ending.ended_s - ending.arrived_s, 4),
        )

    def ended(self, delivery: Delivery) -> None:
        asked, call, attempt, ending = delivery.asked, delivery.call, delivery.attempt, delivery.ending
        assert ending is not None
        tenant = self._tenant_label(ending.tenant)
        usage, entry, arrived_s, now_s = delivery.usage, delivery.entry, ending.arrived_s, ending.ended_s
        booking = None if attempt is None else attempt.booking
        placement = None if booking is None else booking.placement
        first_s = None if booking is None else booking.first_token_s
        margin = NO_MARGIN if placement is None else placement.margin()
        tpot_s = None  # stays None if the first token was not timed
        if usage is not None and first_s is not None and usage.output_tokens > 1:
            tpot_s = round((now_s - first_s) / (usage.output_tokens - 1), 5)
        log.bind().info(  # `log.info` would raise an AttributeError and catch it, in each call
            "call", request_id=ending.request_id, path=ending.path,
            status=ending.status, code=ending.code, message=ending.message, outcome=ending.outcome,
            stream=call.streamed, tenant=tenant, model=ending.model, session=asked.session, output=asked.slot.output,
            engine=placement and placement.engine_id,
            rule=placement and ("after_failure" if delivery.is_retry else placement.rule),
            cost_s=margin.cost_s and round(margin.cost_s, 4),
            margin_s=margin.margin_s and round(margin.margin_s, 4),
            next_engine=margin.next_engine,
            placement=placement and placement.reason,
            objective=call.objective,
            slo_at_risk=(placement and placement.meets_slo is False) or None,
            group=call.group and call.group.group_id.replace(asked.tenant, tenant, 1),
            finish_reason=attempt and attempt.answer.finish,
            failed_on=_failed_on(delivery) if delivery.failures else None, prompt_tokens=call.prompt_tokens,
            predicted_cached_tokens=placement and placement.cached_tokens,
            predicted_loaded_tokens=(placement and placement.loaded and dict(placement.loaded)) or None,
            cached_tokens=usage and usage.cached_tokens,
            output_tokens=usage and usage.output_tokens,
            held_s=asked.slot.inputs_s and round(asked.slot.inputs_s, 4),
            placed_s=booking and round(booking.booked_s - arrived_s, 4),
            waited_s=booking and round(booking.sent_s - arrived_s, 4),
            waited_for=delivery.waited_for() if ending.gateway_s or (entry and entry.waiting.waits) else None,
            ttft_s=first_s and round(first_s - arrived_s, 4),
            tpot_s=tpot_s,
            e2e_s=round(now_s - arrived_s, 4),
        )  # fmt: skip


def _failed_on(delivery: Delivery) -> list[str]:
    return [f"{engine_id}: {error.cause}" for engine_id, error in delivery.failures]
