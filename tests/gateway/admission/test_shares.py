"""What a gateway needs of what several share, and what it may use once the store has said so."""

from __future__ import annotations

from dataclasses import replace

from plait.gateway.admission.shares import LEAST_PART, Need, needs, part_of_engines
from plait.gateway.admission.tenants import UNLIMITED, TenantIds, TenantLimits, TenantTerms, running_of, waiting_of
from plait.gateway.config.sections import AdmissionConfig
from tests.gateway.admission.waiting_fleet import WaitingFleet

TERMS = TenantTerms(AdmissionConfig(max_running=6, max_waiting=50), TenantIds(b"s"), gateways=3)


def test_a_gateway_needs_what_runs_and_what_would_run_with_a_higher_limit() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(max_running=1, max_waiting=20))
    calls = [fleet.enter("a", 100) for _ in range(3)]
    assert needs(fleet.admission, TERMS, fleet.router) == {running_of("a"): Need(6, 3), waiting_of("a"): Need(50, 2)}
    fleet.limits = replace(fleet.limits, max_running=2)
    fleet.admission.limits_changed(fleet.now_s)
    fleet.settle()
    assert fleet.sent == calls[:2]
    for call in calls:
        fleet.end(call)
    assert needs(fleet.admission, TERMS, fleet.router) == {}


def test_without_limits_nothing_is_needed() -> None:
    fleet = WaitingFleet("x")
    fleet.enter("a", 100)
    assert needs(fleet.admission, TenantTerms(AdmissionConfig(), TenantIds(b"s")), fleet.router) == {}
    assert fleet.admission.busy() == {"a"}
    assert fleet.limits == UNLIMITED


def test_sessions_need_the_tokens_of_their_contexts() -> None:
    fleet = WaitingFleet("x", "y", kv_tokens=50_000)
    fleet.enter("a", 9_000, session="s")
    assert needs(fleet.admission, TERMS, fleet.router)["kv m"] == Need(100_000, 9_010)
    assert part_of_engines("m", fleet.router, {"kv m": 75_000}) == 0.75
    assert part_of_engines("m", fleet.router, {"kv m": 0}) == LEAST_PART, "until the others have asked again"
    assert part_of_engines("m", fleet.router, {}) is None
    assert part_of_engines("m", fleet.router, None) is None
