"""Calls are booked when they arrive and sent when their engine has room; none is lost, whatever happens meanwhile."""

from __future__ import annotations

from collections import Counter

import pytest

from plait.backends.errors import LimitError, NoEngineError, OverloadedError
from plait.gateway.admission.lines import MOVED_AT_ONCE
from plait.gateway.admission.tenants import TenantLimits
from plait.policy.costs.engine_view import sent_calls
from plait.policy.types import Objective, Slo
from tests.gateway.admission.waiting_fleet import WaitingFleet
from tests.invariants import check_admission


def test_while_there_is_room_nothing_waits() -> None:
    fleet = WaitingFleet("x", "y")
    calls = [fleet.enter() for _ in range(2)]
    assert fleet.sent == calls
    assert fleet.admission.waiting("m") == 0
    for call in calls:
        fleet.first_byte(call)
        fleet.end(call)
    assert fleet.admission._uses["a"].running == 0


def test_a_call_is_booked_at_once_and_sent_when_its_engine_has_room() -> None:
    fleet = WaitingFleet("x")
    first, second, third = (fleet.enter(tokens=1_500) for _ in range(3))
    assert (fleet.sent, fleet.admission.waiting("m")) == ([first, second], 1)
    assert fleet.router.engines["x"].view.outstanding == 3, "the books count what waits"
    assert sent_calls(fleet.router.engines["x"].view) == 2
    fleet.pass_time(60.0)
    assert third not in fleet.sent, "no more than a second is sent behind the prompt that is computed"
    fleet.first_byte(first)
    assert third in fleet.sent


def test_the_books_of_a_full_engine_send_the_next_call_elsewhere() -> None:
    fleet = WaitingFleet("x", "y")
    calls = [fleet.enter(tokens=3_000) for _ in range(6)]
    assert Counter(map(fleet.engine_of, calls)) == {"x": 3, "y": 3}


def test_a_call_waits_for_the_engine_that_has_its_prefix() -> None:
    fleet = WaitingFleet("x", "y")
    first = fleet.enter(tokens=6_400, prefix=1)
    other = fleet.enter(tokens=900)
    assert fleet.engine_of(first) != fleet.engine_of(other)
    asked = [fleet.enter(tokens=6_400 + 1_100 * number, prefix=1) for number in range(1, 4)]
    assert {fleet.engine_of(call) for call in asked} == {fleet.engine_of(first)}
    assert fleet.sent == [first, other, asked[0]]
    fleet.first_byte(first)
    assert fleet.sent[3:] == [asked[1]]


def test_an_engine_that_runs_dry_takes_the_call_that_gains_most() -> None:
    fleet = WaitingFleet("x", "y", is_busy=True)
    fleet.router.health.unreachable("y")
    calls = [fleet.enter(tokens=3_000) for _ in range(4)]
    assert {fleet.engine_of(call) for call in calls} == {"x"}
    fleet.router.health.answered("y", {"m": None})
    fleet.settle()
    assert fleet.engine_of(calls[3]) == "y"
    assert fleet.sent == [calls[0], calls[3]]
    fleet.first_byte(calls[3])
    assert [fleet.engine_of(call) for call in calls] == ["x", "x", "y", "y"]


@pytest.mark.parametrize(("waited_s", "meets_slo"), [(8.0, True), (31.5, False)])
def test_what_a_call_has_waited_in_a_line_is_not_left_of_its_ttft_in_another(
    waited_s: float, *, meets_slo: bool
) -> None:
    fleet = WaitingFleet("x", "y", is_busy=True)
    fleet.router.health.unreachable("y")
    first, second = fleet.enter(tokens=30_000), fleet.enter(tokens=3_000, ttft_s=34.0)
    assert first.is_sent
    assert second.booking is not None
    before = second.booking.placement
    assert (before.engine_id, before.meets_slo) == ("x", True)
    fleet.pass_time(waited_s)
    fleet.router.health.answered("y", {"m": None})
    fleet.settle()
    assert (fleet.engine_of(second), second.is_sent, second.booking.placement.meets_slo) == ("y", True, meets_slo)


def test_a_line_that_is_placed_anew_has_waited_too() -> None:
    fleet = WaitingFleet("x", "y", is_busy=True)
    calls = [fleet.enter(tokens=3_000, ttft_s=8.0) for _ in range(4)]
    (waiting,) = (call for call in calls if fleet.engine_of(call) == "y" and not call.is_sent)
    assert waiting.booking is not None
    assert waiting.booking.placement.meets_slo
    fleet.pass_time(1.9)
    fleet.router.health.drain("y")
    fleet.settle()
    assert fleet.engine_of(waiting) == "x"
    assert waiting.booking.placement.meets_slo is False, "7.2 s, of which 6.1 s are left"


def test_a_line_is_placed_anew_when_its_engine_goes() -> None:
    fleet = WaitingFleet("x", "y", is_busy=True)
    calls = [fleet.enter(tokens=3_000) for _ in range(6)]
    waiting = [call for call in calls if fleet.engine_of(call) == "y" and not call.is_sent]
    assert len(waiting) == 2
    fleet.router.health.drain("y")
    fleet.settle()
    assert {fleet.engine_of(call) for call in waiting} == {"x"}
    assert not fleet.errors()
    for call in (call for call in calls if call.is_sent and fleet.engine_of(call) == "y"):
        fleet.first_byte(call)
        fleet.end(call)
    fleet.router.remove_engine("y")
    assert len(fleet.serve(5)) == 5


def test_a_line_without_any_engine_fails_as_new_calls_do() -> None:
    fleet = WaitingFleet("x", is_busy=True)
    sent, waiting = fleet.enter(tokens=3_000), fleet.enter(tokens=3_000)
    fleet.router.health.unreachable("x")
    fleet.settle()
    assert isinstance(waiting.error, NoEngineError)
    assert sent.error is None
    with pytest.raises(NoEngineError):
        fleet.enter()
    assert fleet.admission.waiting("m") == 0


def test_a_call_whose_client_goes_leaves_its_place() -> None:
    fleet = WaitingFleet("x", is_busy=True)
    _, second, third = (fleet.enter(tokens=3_000) for _ in range(3))
    fleet.go(second)
    assert fleet.admission.waiting("m") == 1
    assert fleet.router.engines["x"].view.outstanding == 2
    fleet.go(third)
    assert fleet.admission.waiting("m") == 0


def test_a_call_that_is_sent_in_the_moment_its_client_goes_is_released() -> None:
    fleet = WaitingFleet("x")
    call = fleet.enter()
    assert call.is_sent
    fleet.go(call)
    assert fleet.router.engines["x"].view.outstanding == 0


# Slots.


def test_an_engine_gets_no_more_calls_than_it_runs() -> None:
    fleet = WaitingFleet("x")
    fleet.router.engines["x"].view.slots = 2
    calls = [fleet.enter(tokens=64) for _ in range(4)]
    assert fleet.sent == calls[:2]
    fleet.first_byte(calls[0])
    assert fleet.sent == calls[:2], "a running call has its slot until it ends"
    fleet.end(calls[0])
    assert fleet.sent == calls[:3]


# Tenants.


def test_one_tenant_cannot_take_the_others_share() -> None:
    fleet = WaitingFleet("x", is_busy=True)
    for name, calls in (("greedy", 60), ("b", 10), ("c", 10)):
        for _ in range(calls):
            fleet.enter(name, 1_200)
    served = Counter(call.tenant for call in fleet.serve(27))
    assert all(8 <= served[name] <= 10 for name in ("greedy", "b", "c")), served


def test_calls_with_a_ttft_go_first_and_calls_for_throughput_last() -> None:
    fleet = WaitingFleet("x", is_busy=True)
    first = fleet.enter(tokens=3_000)
    batch = fleet.enter(tokens=3_000, objective=Objective.THROUGHPUT)
    plain = fleet.enter(tokens=3_000)
    urgent = fleet.enter(tokens=3_000, ttft_s=9.0)
    assert fleet.serve(4) == [first, urgent, plain, batch]


def test_a_tenant_at_its_limit_waits_while_others_go() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(max_running=1, max_waiting=1))
    first, second = fleet.enter(tokens=64), fleet.enter(tokens=64)
    assert (fleet.sent, fleet.engine_of(second)) == ([first], None)
    with pytest.raises(LimitError, match="1 calls of this tenant wait already"):
        fleet.enter(tokens=64)
    other = fleet.enter("b", tokens=64)
    assert other.is_sent
    fleet.end(first)
    assert second.is_sent


def test_a_call_that_waits_for_its_tenants_limit_may_go() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(max_running=1))
    first, second = fleet.enter(), fleet.enter()
    fleet.go(second)
    fleet.end(first)
    assert fleet.admission.waiting("m") == 0


def test_too_many_in_line_are_refused() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(max_waiting=1), is_busy=True)
    fleet.enter(tokens=3_000)
    fleet.enter(tokens=3_000)
    with pytest.raises(LimitError):
        fleet.enter(tokens=3_000)
    assert fleet.router.engines["x"].view.outstanding == 2


# What is too much.


def test_beyond_the_bound_calls_are_refused_with_the_time_to_come_back() -> None:
    fleet = WaitingFleet("x", max_wait_s=6.5, is_busy=True)
    calls = [fleet.enter(tokens=3_000) for _ in range(4)]
    error = calls[3].error
    assert isinstance(error, OverloadedError)
    assert error.message.startswith("2 calls of this tenant wait for this model, about 6 s")
    assert error.status == 429
    assert error.retry_after_s == pytest.approx(6.0, rel=0.02)
    assert [call.error for call in calls[:3]] == [None] * 3
    alone = WaitingFleet("x", max_wait_s=0.5, is_busy=True)
    assert [alone.enter(tokens=3_000).error for _ in range(2)] == [None] * 2, "one call may always wait"


def test_calls_for_throughput_are_given_up_first() -> None:
    fleet = WaitingFleet("x", max_wait_s=6.5)
    fleet.enter(tokens=3_000)
    batch = [fleet.enter("b", 3_000, objective=Objective.THROUGHPUT) for _ in range(2)]
    urgent = fleet.enter("a", 3_000)
    assert [call.error is None for call in (*batch, urgent)] == [True, False, True]


def test_a_tenant_within_its_share_loses_nothing_to_anothers_queue() -> None:
    fleet = WaitingFleet("x", max_wait_s=10.0)
    for _ in range(30):
        fleet.enter("greedy", 1_000)
    refused = len(fleet.errors())
    light = [fleet.enter("b", 1_000) for _ in range(4)]
    assert [call.error for call in light] == [None] * 4
    assert len(fleet.errors()) == refused + 4


def test_a_normal_call_is_not_given_up_while_one_for_throughput_waits() -> None:
    fleet = WaitingFleet("x", max_wait_s=12.5)
    fleet.enter("a", 3_000)
    batch = [fleet.enter("b", 3_000, objective=Objective.THROUGHPUT) for _ in range(2)]
    plain = [fleet.enter(tenant, 3_000) for tenant in ("a", "a", "c")]
    assert [call.error is None for call in (*batch, *plain)] == [True, False, True, True, True]


def test_objectives_that_change_move_a_call_to_its_new_class() -> None:
    fleet = WaitingFleet("x", is_busy=True)
    first, second, third = (fleet.enter(tokens=3_000) for _ in range(3))
    fleet.admission.refine(third, third.call._replace(slo=Slo(ttft_s=5.0)), 0.0)
    assert fleet.serve(3) == [first, third, second]


def test_a_long_line_is_placed_anew_in_slices_and_in_order() -> None:
    fleet = WaitingFleet("x", "y", is_busy=True)
    fleet.router.health.unreachable("y")
    calls = [fleet.enter(tokens=2_000) for _ in range(2 * MOVED_AT_ONCE + 10)]
    fleet.router.health.answered("y", {"m": None})
    fleet.router.health.unreachable("x")
    steps = 0
    while any(fleet.engine_of(call) == "x" for call in calls[1:]):
        fleet.settle_next()
        steps += 1
        check_admission(fleet.admission, fleet.entered)
    assert steps > 2
    fleet.settle()
    assert [call for call in fleet.serve(len(calls)) if call is not calls[0]] == calls[1:]
