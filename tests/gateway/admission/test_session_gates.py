"""Sessions that wait until their contexts fit into the caches, before their calls wait for an engine."""

from __future__ import annotations

from math import inf

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from plait.backends.errors import LimitError, NoEngineError, SessionWaitingError
from plait.gateway.admission.admission import caches
from plait.gateway.admission.metrics import AdmissionCollector
from plait.gateway.admission.tenants import UNLIMITED, TenantLimits
from plait.policy.sessions.session_gate import MOST_HELD_S
from tests.gateway.admission.waiting_fleet import WaitingFleet

KV_TOKENS = 10_000


def closed_fleet(limits: TenantLimits = UNLIMITED) -> WaitingFleet:
    """An engine with a gate before it that is closed, whatever it is worth. A chat has been there."""
    fleet = WaitingFleet("x", kv_tokens=KV_TOKENS, ahead_s=100.0, limits=limits)
    fleet.end(fleet.enter())
    worth = fleet.admission.sessions.gates["m"].worth
    worth.is_closed, worth.due_s = True, inf
    return fleet


def test_a_session_is_held_until_there_is_room_and_sent_then() -> None:
    fleet = closed_fleet()
    first = fleet.enter(tokens=6_000, session="first")
    held = fleet.enter(tokens=5_000, session="second")
    assert (first.is_sent, held.is_held, held.booking) == (True, True, None)
    assert fleet.admission.waiting("m") == 0, "it does not wait for the engine"
    assert fleet.admission.outlook(held, fleet.now_s)[0] == 1
    fleet.end(first)
    assert held.is_held, "the first session may come back"
    fleet.pass_time(20.0)
    assert held in fleet.sent
    fleet.end(held)


def test_a_sessions_last_call_gives_its_room_up() -> None:
    """The last call is a short one that extends nothing, as Dynamo's clients send it."""
    fleet = closed_fleet()
    fleet.end(fleet.enter(tokens=6_000, session="first"))
    held = fleet.enter(tokens=5_000, session="second")
    other = fleet.enter(tokens=10, session="third", is_final=True)
    fleet.end(other)
    last, running = fleet.enter(tokens=10, session="first", is_final=True), fleet.enter(tokens=10, session="first")
    fleet.end(running)
    assert held.is_held
    fleet.end(last)
    assert held in fleet.sent


def test_a_held_call_that_leaves_is_told_its_place_and_comes_back() -> None:
    fleet = closed_fleet()
    first = fleet.enter(tokens=6_000, session="first")
    held = fleet.enter(tokens=5_000, session="second")
    fleet.entered.remove(held)
    error = fleet.admission.leave(held, fleet.now_s)
    assert isinstance(error, SessionWaitingError)
    assert (error.status, error.code, error.position) == (429, "session_waiting", 1)
    assert error.retry_after_s is not None
    fleet.end(first)
    fleet.pass_time(20.0)
    assert not fleet.admission.sessions.gates["m"].held
    assert fleet.enter(tokens=5_000, session="second").is_sent


def test_a_client_that_goes_gives_its_place_up() -> None:
    fleet = closed_fleet()
    first = fleet.enter(tokens=6_000, session="first")
    fleet.go(fleet.enter(tokens=5_000, session="second"))
    third = fleet.enter(tokens=4_000, session="third")
    fleet.admission.gone(first, fleet.now_s)
    fleet.entered.remove(first)
    fleet.pass_time(20.0)
    assert third in fleet.sent


def test_a_held_call_fails_if_no_engine_is_left_when_it_may_go() -> None:
    fleet = closed_fleet()
    fleet.enter(tokens=6_000, session="first")
    held = fleet.enter(tokens=5_000, session="second")
    fleet.router.health.drain("x")
    fleet.pass_time(MOST_HELD_S + 1)
    assert isinstance(held.error, NoEngineError)
    assert held.turn is None
    fleet.entered.remove(held)
    fleet.settle()


def test_only_a_first_turn_is_refused_because_many_wait() -> None:
    fleet = closed_fleet(TenantLimits(max_waiting=1))
    begun = fleet.enter(tokens=4_000, session="begun", prefix=100)
    fleet.end(begun)
    running = fleet.enter(tokens=6_000, session="running")
    fleet.pass_time(20.0)
    assert fleet.enter(tokens=5_000, session="second").is_held
    with pytest.raises(LimitError, match="1 calls of this tenant wait"):
        fleet.enter(tokens=5_000, session="third")
    assert fleet.enter(tokens=4_100, session="begun", prefix=100).is_held
    fleet.end(running)


def test_the_capacity_is_that_of_the_engines_that_take_calls() -> None:
    fleet = WaitingFleet("x", "y", kv_tokens=KV_TOKENS)
    found = caches(fleet.router, "m")
    assert found is not None
    assert (found.engines, found.kv_tokens) == (2, 2 * KV_TOKENS)
    fleet.router.health.drain("y")
    found = caches(fleet.router, "m")
    assert found is not None
    assert found.kv_tokens == KV_TOKENS
    assert caches(WaitingFleet("x").router, "m") is None, "it is not known"


def test_what_operators_read() -> None:
    fleet, registry = closed_fleet(), CollectorRegistry()
    registry.register(AdmissionCollector(fleet.admission))
    fleet.enter(tokens=6_000, session="first")
    fleet.enter(tokens=5_000, session="second")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "m", **labels})

    assert (value("plait_sessions", state="live"), value("plait_sessions", state="held")) == (1, 1)
    assert value("plait_session_live_tokens") == 6_010
    assert value("plait_session_kv_tokens") == KV_TOKENS
    assert value("plait_session_gate_closed") == 1


def test_it_is_logged_when_sessions_are_held_no_more() -> None:
    fleet = closed_fleet()
    fleet.enter(tokens=6_000, session="first")
    held = fleet.enter(tokens=5_000, session="second")
    fleet.admission.sessions.gates["m"].worth.due_s = -inf
    with capture_logs() as logs:
        fleet.pass_time(1.0)
    assert [line["event"] for line in logs] == ["sessions are held no more"]
    assert logs[0]["model"] == "m"
    assert held.is_sent
