"""Calls that their engines have forgotten: later calls are served, and trials, and these are not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plait.backends.protocol.cache_state import QueueState
from plait.gateway.fleet import fleet_health
from plait.gateway.fleet.booking import PATIENCE, UNHEARD_S, Booking, CallUsage, Failure
from plait.gateway.fleet.router import Router
from plait.policy.types import Call, Objective, Slo
from tests.gateway.fleet.lettered_prompts import report
from tests.gateway.fleet.two_engines import booked, two_engines


@pytest.fixture
def router() -> Router:
    return two_engines()


def forgotten(router: Router, now_s: float) -> list[Booking]:
    """The calls that an engine has forgotten."""
    return [booking for engine in router.engines.values() for booking in engine.progress.forgotten(now_s)]


def overtake(router: Router, now_s: float, *, tokens: int = 100, **more: Any) -> None:
    """A later call is served."""
    call = Call("late", "m", tokens, 64, [], **more)
    booking = router.book(call, router.select(call, now_s, prefer="a"), now_s)
    if call.streamed:
        router.first_token(booking, now_s)
    router.settle(booking, CallUsage(tokens, 1), now_s)


def test_a_call_that_many_as_large_overtake_is_forgotten(router: Router) -> None:
    early = booked(router, 0.0)
    for number in range(3):
        assert forgotten(router, 100.0) == []
        overtake(router, 10.0 + number)
    assert forgotten(router, 100.0) == [early]
    router.fail(early, Failure("timeout"), 100.0)
    assert forgotten(router, 100.0) == []


def test_a_call_whose_grammar_is_compiled_may_be_overtaken_for_longer(router: Router) -> None:
    call = Call("early", "m", 100, 64, [], has_grammar=True)
    early = router.book(call, router.select(call, 0.0, prefer="a"), 0.0)
    for number in range(9):
        overtake(router, 10.0 + number)
    assert forgotten(router, 100.0) == []
    for number in range(3):
        overtake(router, 48.0 + number)
    assert forgotten(router, 100.0) == [early]


def all_forgotten(router: Router, now_s: float = 100.0) -> list[Booking]:
    return fleet_health.forgotten(router.engines.values(), router.health.lag, now_s)


@pytest.mark.parametrize(("waiting", "running", "are_forgotten"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_an_engine_that_says_it_has_all_its_calls_has_forgotten_none(
    router: Router, waiting: int, running: int, *, are_forgotten: bool
) -> None:
    early = booked(router, 0.0)
    for _ in range(3):
        overtake(router, 10.0)
    late = booked(router, 60.0)
    queue = QueueState(waiting=waiting, running=running)
    router.report("a", msgspec.structs.replace(report(), queue=queue), requested_s=50.0)
    assert all_forgotten(router) == [early] * are_forgotten, "the last call came after the report"
    router.report("a", msgspec.structs.replace(report(), queue=queue), requested_s=60.0)
    assert all_forgotten(router) == [early]
    router.release(late, 100.0, delivered=False)


def test_a_report_may_lack_a_call_that_has_just_come(router: Router) -> None:
    early = booked(router, 0.0)
    for _ in range(3):
        overtake(router, 10.0)
    reported = msgspec.structs.replace(report(), queue=QueueState(waiting=1))
    router.report("a", reported, requested_s=98.0)
    late = booked(router, 98.9)
    router.report("a", reported, requested_s=99.0)
    assert all_forgotten(router, 100.9) == []
    assert all_forgotten(router, 101.1) == [early], "in three seconds it would have come"
    router.release(late, 102.0, delivered=False)


def test_before_it_is_late_a_call_may_be_overtaken(router: Router) -> None:
    booked(router, 0.0)
    for _ in range(20):
        overtake(router, 2.2)
    assert forgotten(router, 100.0) == []


@pytest.mark.parametrize(
    "more",
    [
        {"tokens": 49},
        {"priority": -1},
        {"objective": Objective.LATENCY},
        {"slo": Slo(ttft_s=1.0)},
        {"streamed": False, "output_limit": 10},
    ],
    ids=["shorter", "more urgent", "for latency", "with an SLO", "not streamed"],
)
def test_what_a_scheduler_favours_does_not_count(router: Router, more: dict[str, Any]) -> None:
    booked(router, 0.0)
    for number in range(20):
        overtake(router, 10.0 + number, **more)
    assert forgotten(router, 100.0) == []


@pytest.mark.parametrize(("limit", "count"), [(10, 1), (50, 1), (5, 0), (None, 0)])
def test_a_whole_answer_is_overtaken_by_ones_as_long(router: Router, limit: int | None, count: int) -> None:
    booked(router, 0.0, streamed=False, limit=10)
    for number in range(3):
        overtake(router, 10.0 + number, streamed=False, output_limit=limit)
    assert len(forgotten(router, 100.0)) == count


# Streams that are silent for longer than their tokens take.


def passed(router: Router, *begun_s: float, trial_s: float = 2.0) -> None:
    """Trials have passed. They have two tokens."""
    for moment_s in begun_s:
        router.health.proved("a", moment_s, moment_s + trial_s, streamed=True)


def silent(router: Router, limit: int | None = 40) -> Booking:
    """A stream that has begun at 1 s."""
    stream = booked(router, 0.0, limit=limit)
    router.first_token(stream, 1.0)
    return stream


def test_a_stream_is_forgotten_once_all_of_its_tokens_would_have_come(router: Router) -> None:
    stream = silent(router)
    passed(router, 3.0, 11.0)
    assert forgotten(router, 500.0) == []
    passed(router, 19.0)
    assert forgotten(router, 1.0 + PATIENCE * 40 * 1.0) == []
    assert forgotten(router, 1.1 + PATIENCE * 40 * 1.0) == [stream]
    router.engines["a"].progress.next_byte(stream, 20.0)
    assert forgotten(router, 500.0) == [], "the trials were before this byte"
    passed(router, 21.0, 22.0, 23.0)
    stream.client_is_slow = True
    assert forgotten(router, 500.0) == []


def test_the_slowest_of_later_answers_and_trials_counts(router: Router) -> None:
    stream = silent(router)
    passed(router, 2.0, trial_s=0.1)
    for number, tokens in enumerate((1, 20)):
        later = booked(router, 3.0 + number)
        router.first_token(later, 3.5 + number)
        router.settle(later, CallUsage(100, tokens), 5.0 + number)
    assert forgotten(router, 1.0 + PATIENCE * 40 * 2.0) == []
    assert forgotten(router, 1.1 + PATIENCE * 40 * 2.0) == [stream]


@pytest.mark.parametrize(("limit", "are_forgotten"), [(8, True), (None, False)])
def test_a_short_stream_may_be_silent_for_long_and_one_without_a_limit_for_longer(
    router: Router, limit: int | None, *, are_forgotten: bool
) -> None:
    stream = silent(router, limit)
    passed(router, 3.0, 11.0, 19.0, trial_s=0.1)
    assert forgotten(router, 1.0 + UNHEARD_S) == []
    assert forgotten(router, 500.0) == [stream] * are_forgotten


def test_an_engine_that_says_it_has_all_its_calls_has_forgotten_no_stream(router: Router) -> None:
    silent(router, 8)
    passed(router, 3.0, 4.0, 5.0)
    router.report("a", msgspec.structs.replace(report(), queue=QueueState(running=1)), requested_s=60.0)
    assert all_forgotten(router, 60.5) == []
