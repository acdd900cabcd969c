"""Prometheus metrics of what calls were promised: SLO attainment and goodput, by objective and tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from plait.gateway.calls.exchange import Exchange
from plait.gateway.metrics import FastCounter


class ObjectiveMetrics:
    """Counts calls that were promised something. `objective` is latency, throughput or empty."""

    def __init__(self, registry: CollectorRegistry, tenant_label: Callable[[str], str]) -> None:
        self._tenant_label = tenant_label
        labels = ["model", "tenant", "objective"]
        self._slo = FastCounter(
            "plait_slo_calls", "Calls with this SLO, by whether it was met", [*labels, "slo", "met"]
        )
        self._good = FastCounter("plait_good_calls", "Calls that met all their SLOs: the rate is the goodput", labels)
        registry.register(self._slo)
        registry.register(self._good)

    def ended(self, exchange: Exchange, now_s: float, *, answered: bool) -> None:
        """A call was answered, or its engine failed it."""
        call, tenant = exchange.booking.call, self._tenant_label(exchange.delivery.tenant)
        labels = (call.model, tenant, "" if call.objective is None else call.objective)
        met_all = answered
        for slo, limit_s, taken_s in _times(exchange, now_s):
            met = answered and taken_s <= limit_s
            met_all &= met
            self._slo.of(*labels, slo, "yes" if met else "no").inc()
        if met_all:
            self._good.of(*labels).inc()


def _times(exchange: Exchange, now_s: float) -> Iterator[tuple[str, float, float]]:
    """Each SLO of the call, with its limit and the time that was taken."""
    booking, slo, arrived_s = exchange.booking, exchange.booking.call.slo, exchange.delivery.arrived_s
    if slo is None:
        return
    first_s = now_s if booking.first_token_s is None else booking.first_token_s
    tokens = 0 if exchange.usage is None else exchange.usage.output_tokens
    if slo.ttft_s is not None:
        yield "ttft", slo.ttft_s, first_s - arrived_s
    if slo.tpot_s is not None:
        yield "tpot", slo.tpot_s, (now_s - first_s) / max(1, tokens - 1)
    if slo.jct_s is not None:
        yield "jct", slo.jct_s, now_s - arrived_s
