"""Calls that are sent before others that wait for their engine: those on time, and small ones.

A prompt takes 1 ms for each token. A small one has up to 90.
"""

from __future__ import annotations

from typing import Any

import pytest

from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.tenants import TenantLimits
from plait.policy.types import NEAR_S, Objective, Slo
from tests.gateway.admission.waiting_fleet import WaitingFleet

LONG = 3_000


def full_fleet(*, urgent_first: bool = True) -> tuple[WaitingFleet, Waiting, Waiting]:
    """An engine that has been sent a long prompt of tenant a, and one that waits for it."""
    fleet = WaitingFleet("x", is_busy=True, urgent_first=urgent_first)
    sent, waiting = fleet.enter(tokens=LONG), fleet.enter(tokens=LONG)
    assert (sent.is_sent, waiting.is_sent) == (True, False)
    return fleet, sent, waiting


# On time.


@pytest.mark.parametrize("promise", ["TTFT", "JCT"])
def test_a_call_that_can_keep_its_promise_passes(promise: str) -> None:
    fleet, _, waiting = full_fleet()
    call = fleet.enter(tokens=LONG, ttft_s=3.5) if promise == "TTFT" else fleet.enter(tokens=LONG, jct_s=3.5)
    assert call.is_sent
    assert not waiting.is_sent


def test_a_call_that_cannot_keep_its_promise_waits_its_turn() -> None:
    fleet, sent, waiting = full_fleet()
    late = fleet.enter(tokens=LONG, ttft_s=2.5)
    assert not late.is_sent
    assert fleet.serve(3) == [sent, late, waiting], "it is still the urgent one of its tenant"


def test_an_engine_that_serves_in_order_is_sent_urgent_calls_in_their_turn() -> None:
    fleet, *_ = full_fleet(urgent_first=False)
    assert not fleet.enter(tokens=LONG, ttft_s=60.0).is_sent


def test_calls_on_time_wait_for_each_other() -> None:
    fleet, *_ = full_fleet()
    first, second, third = (fleet.enter(tokens=LONG, ttft_s=9.9) for _ in range(3))
    assert (first.is_sent, second.is_sent, third.is_sent) == (True, True, False)
    fleet.first_byte(first)
    assert third.is_sent


def test_a_call_that_has_waited_too_long_passes_no_more() -> None:
    fleet, *_ = full_fleet()
    first, _, last = (fleet.enter(tokens=LONG, ttft_s=5.0) for _ in range(3))
    fleet.pass_time(2.5)
    fleet.first_byte(first)
    assert not last.is_sent


def test_a_promise_that_a_call_gets_while_it_waits_lets_it_pass() -> None:
    fleet, _, waiting = full_fleet()
    behind = fleet.enter(tokens=LONG)
    fleet.admission.refine(behind, behind.call._replace(slo=Slo(ttft_s=5.0)), fleet.now_s)
    fleet.settle()
    assert (waiting.is_sent, behind.is_sent) == (False, True)


def test_a_promise_counts_from_the_arrival_of_its_call() -> None:
    fleet, *_ = full_fleet()
    behind = fleet.enter(tokens=LONG)
    fleet.pass_time(2.5)
    fleet.admission.refine(behind, behind.call._replace(slo=Slo(ttft_s=5.0)), fleet.now_s)
    fleet.settle()
    assert not behind.is_sent


def test_a_call_whose_deadline_is_far_passes_once_it_is_near() -> None:
    fleet, _, waiting = full_fleet()
    call = fleet.enter(tokens=LONG, ttft_s=NEAR_S + 5.0)
    fleet.pass_time(4.9)
    assert not call.is_sent
    fleet.pass_time(0.2)
    assert (call.is_sent, waiting.is_sent) == (True, False)


# Small.


def test_a_small_call_passes() -> None:
    fleet, _, waiting = full_fleet()
    assert fleet.enter(tokens=64).is_sent
    assert not fleet.enter(tokens=128).is_sent
    assert not waiting.is_sent


def test_small_calls_wait_for_each_other() -> None:
    fleet, *_ = full_fleet()
    calls = [fleet.enter(tokens=64) for _ in range(20)]
    assert 10 < sum(call.is_sent for call in calls) < 20, "a second of them is sent"
    first = calls[0]
    fleet.first_byte(first)
    assert sum(call.is_sent for call in calls) > 11


def test_small_calls_pass_a_long_one_until_it_is_owed_as_many_tokens() -> None:
    fleet, _, waiting = full_fleet()
    passed = 0
    while (call := fleet.enter(tokens=64)).is_sent:
        passed += call.tokens
        fleet.first_byte(call)
        fleet.end(call)
    assert waiting.tokens <= passed < waiting.tokens + call.tokens
    assert not waiting.is_sent


def test_a_call_that_counts_on_a_prefix_is_small_once_the_prefix_was_sent() -> None:
    fleet, sent, waiting = full_fleet()
    first = fleet.enter(tokens=6_400, prefix=1)
    behind = fleet.enter(tokens=6_450, prefix=1)
    assert not behind.is_sent, "alone, it would compute the prefix"
    for call in (sent, waiting):
        fleet.first_byte(call)
    assert (first.is_sent, behind.is_sent) == (True, True)


# Of a tenant over its share.


def greedy_fleet() -> tuple[WaitingFleet, list[Waiting]]:
    """Tenant a has been sent much and has calls that wait; nobody else has."""
    fleet = WaitingFleet("x", is_busy=True, urgent_first=True)
    other = fleet.enter("b", tokens=64)
    fleet.first_byte(other)
    fleet.end(other)
    waiting = [fleet.enter(tokens=LONG) for _ in range(3)]
    fleet.router.engines["x"].cache.others.clear()
    return fleet, waiting[1:]


def test_its_calls_on_time_pass_its_own_in_turn() -> None:
    fleet, waiting = greedy_fleet()
    first, second = (fleet.enter(tokens=100, ttft_s=9.0) for _ in range(2))
    assert (first.is_sent, second.is_sent) == (True, True)
    late = fleet.enter(tokens=LONG, ttft_s=1.0)
    assert not fleet.enter(tokens=100, ttft_s=9.0).is_sent, "an older one is urgent, too"
    assert not any(call.is_sent for call in (late, *waiting))


def test_its_small_calls_do_not_pass() -> None:
    fleet, _ = greedy_fleet()
    assert not fleet.enter(tokens=64).is_sent
    assert fleet.enter("b", tokens=64).is_sent


def test_its_small_calls_go_first_in_its_turn() -> None:
    fleet, waiting = greedy_fleet()
    small = fleet.enter(tokens=64)
    assert fleet.serve(2)[1] is small
    assert not any(call.is_sent for call in waiting[1:])


def test_it_passes_nobody_else_who_waits() -> None:
    fleet, _ = greedy_fleet()
    other = fleet.enter("b", tokens=LONG)
    assert not other.is_sent
    assert not fleet.enter(tokens=100, ttft_s=9.0).is_sent


def test_it_passes_nobody_else_in_the_engine() -> None:
    fleet, _ = greedy_fleet()
    other = fleet.enter("b", tokens=64)
    assert other.is_sent
    urgent = fleet.enter(tokens=100, ttft_s=9.0)
    assert not urgent.is_sent
    fleet.first_byte(other)
    assert urgent.is_sent


# Of one tenant, by rank and priority.


@pytest.mark.parametrize(
    "fields", [{"objective": Objective.LATENCY}, {"priority": -1}, {"ttft_s": 1.0}], ids=["latency", "priority", "late"]
)
def test_a_small_call_goes_before_small_ones_of_later_classes(fields: dict[str, Any]) -> None:
    fleet = WaitingFleet("x", is_busy=True)
    fleet.enter(tokens=LONG)
    while fleet.enter(tokens=64).is_sent:
        pass
    plain = fleet.enter(tokens=64)
    first = fleet.enter(tokens=64, **fields)
    last = fleet.enter(tokens=64, objective=Objective.THROUGHPUT)
    while not first.is_sent:
        fleet.serve(1)
    assert (plain.is_sent, last.is_sent) == (False, False)


@pytest.mark.parametrize("tokens", [64, LONG])
def test_small_calls_for_throughput_keep_a_tenth_beside_a_flood(tokens: int) -> None:
    fleet = WaitingFleet("x", is_busy=True)
    fleet.enter(tokens=LONG)
    batch = [fleet.enter(tokens=64, objective=Objective.THROUGHPUT) for _ in range(3)]
    flood = [fleet.enter(tokens=tokens) for _ in range(60)]
    fleet.serve(40)
    assert all(call.is_sent for call in batch)
    assert not all(call.is_sent for call in flood)


def test_a_class_orders_calls_that_their_tenants_other_calls_hold() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(max_running=1))
    running, last = fleet.enter(), fleet.enter(objective=Objective.THROUGHPUT)
    plain, low = fleet.enter(), fleet.enter(priority=1)
    first = fleet.enter(objective=Objective.LATENCY)
    assert fleet.serve(5) == [running, first, plain, low, last]
