"""What operators read of waiting calls."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from plait.gateway.admission.metrics import AdmissionCollector
from tests.gateway.admission.waiting_fleet import WaitingFleet


def test_waiting_calls_are_counted_by_model_and_by_tenant() -> None:
    fleet, registry = WaitingFleet("x", is_busy=True), CollectorRegistry()
    registry.register(AdmissionCollector(fleet.admission, str.upper))
    for tenant in "aaaab":
        fleet.enter(tenant, tokens=1_500)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "m", **labels})

    assert value("plait_waiting_calls") == 4
    assert (value("plait_tenant_waiting_calls", tenant="A"), value("plait_tenant_waiting_calls", tenant="B")) == (3, 1)
    of_a, of_b = (value("plait_tenant_waiting_seconds", tenant=tenant) for tenant in "AB")
    assert of_a is not None
    assert of_b is not None
    assert of_a > of_b > 1.0
    for call in fleet.sent:  # which grows
        fleet.first_byte(call)
    assert value("plait_waiting_calls") == 0
    assert value("plait_tenant_waiting_calls", tenant="A") is None
