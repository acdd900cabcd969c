"""The line that a call leaves in the log once it has ended."""

from __future__ import annotations

import structlog

from plait.gateway.calls.delivery import Delivery

log = structlog.get_logger(__name__)


def log_call(delivery: Delivery, tenant: str, now_s: float) -> None:
    """Write the line. `tenant` is the tenant as operators read it. Times are in seconds."""
    call, booking, usage, arrived_s = delivery.call, delivery.booking, delivery.usage, delivery.arrived_s
    placement = booking and booking.placement
    first_s = None if booking is None else booking.first_token_s
    tpot_s = None  # the mean time of a token after the first, where they were timed
    if usage is not None and first_s is not None and usage.output_tokens > 1:
        tpot_s = round((now_s - first_s) / (usage.output_tokens - 1), 5)
    log.info(
        "call",
        request_id=call.call_id,
        path=delivery.path,
        status=delivery.status,
        stream=call.streamed,
        tenant=tenant,
        model=call.model,
        session=delivery.session,
        output=delivery.output,
        engine=placement and placement.engine_id,
        placement=placement and placement.reason,
        objective=call.objective,
        slo_at_risk=(placement and placement.meets_ttft is False) or None,
        group=call.group and call.group.group_id.replace(delivery.tenant, tenant, 1),
        outcome=delivery.outcome if booking or not delivery.failures else "no_engine",
        finish_reason=delivery.finish,
        failed_on=[f"{engine_id}: {error.cause}" for engine_id, error in delivery.failures] or None,
        prompt_tokens=call.prompt_tokens,
        predicted_cached_tokens=placement and placement.cached_tokens,
        cached_tokens=usage and usage.cached_tokens,
        output_tokens=usage and usage.output_tokens,
        held_s=delivery.held_s and round(delivery.held_s, 4),
        placed_s=booking and round(booking.booked_s - arrived_s, 4),
        waited_s=booking and round(booking.sent_s - booking.booked_s, 4),
        ttft_s=first_s and round(first_s - arrived_s, 4),
        tpot_s=tpot_s,
        e2e_s=round(now_s - arrived_s, 4),
    )
