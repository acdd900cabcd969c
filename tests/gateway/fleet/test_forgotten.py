"""Calls that their engines have forgotten: later calls are served, and trials, and these are not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plait.backends.protocol.cache_state import QueueState
from plait.backends.protocol.engine_counts import EngineCounts
from plait.gateway.fleet.booking import PATIENCE, UNHEARD_S, Booking, CallUsage, Failure
from plait.gateway.fleet.router import Router
from plait.policy.types import Call, Objective, Slo
from tests.gateway.fleet.lettered_prompts import report
from tests.gateway.fleet.two_engines import booked, two_engines


@pytest.fixture
def router() -> Router:
    return two_engines()


def forgotten(router: Router, now_s: float) -> list[Booking]:
    """The calls that an engine may have forgotten."""
    every = (engine.progress for engine in router.engines.values())
    return [booking for one in every for booking in (*one.overtaken(now_s), *one.outlasting(now_s))]


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
    return [*router.health.overtaken(now_s), *router.health.outlasting(now_s)]


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


# Streams that are silent although the engine had time for all of their tokens.

LIMIT = 10


def silent(router: Router, limit: int | None = LIMIT, **more: Any) -> Booking:
    """A stream that has begun at 1 s and was looked at then."""
    call = Call("silent", "m", 100, 64, [], output_limit=limit, **more)
    stream = router.book(call, router.select(call, 0.0, prefer="a"), 0.0)
    router.first_token(stream, 1.0)
    assert forgotten(router, 1.0) == []
    return stream


def answer(router: Router, sent_s: float, tokens: int = 40, *, choices: int = 1, model: str = "m", **more: Any) -> None:
    """A later call of so many tokens in each of its choices, which takes a second."""
    call = Call("late", model, 100, 64, [], choices=choices, **more)
    booking = router.book(call, router.select(call, sent_s, prefer="a"), sent_s)
    router.first_token(booking, sent_s + 0.1)
    router.settle(booking, CallUsage(100, tokens * choices), sent_s + 1.0)


def test_a_stream_is_forgotten_if_the_engine_had_time_for_all_of_its_tokens(router: Router) -> None:
    stream = silent(router)
    answer(router, 2.0, int(PATIENCE * LIMIT))
    assert forgotten(router, 500.0) == []
    answer(router, 3.0, 2)
    assert forgotten(router, 1.0 + UNHEARD_S) == []
    assert forgotten(router, 1.1 + UNHEARD_S) == [stream]
    router.engines["a"].progress.next_byte(stream, 60.0)
    assert forgotten(router, 60.5) == []
    assert forgotten(router, 500.0) == [], "the answers were before this byte"
    answer(router, 501.0)
    stream.client_is_slow = True
    assert forgotten(router, 600.0) == []


@pytest.mark.parametrize(
    "more",
    [
        {"tokens": 3, "choices": 32},
        {"tokens": 1},
        {"model": "other"},
        {"priority": -1},
        {"slo": Slo(ttft_s=1.0)},
        {"objective": Objective.LATENCY},
    ],
    ids=["many choices", "an embedding", "another model", "more urgent", "with an SLO", "for latency"],
)
def test_some_answers_say_nothing_of_it(router: Router, more: dict[str, Any]) -> None:
    router.health.answered("a", {"m": None, "other": None})
    silent(router)
    for number in range(9):
        answer(router, 2.0 + number, **more)
    assert forgotten(router, 500.0) == []


def test_answers_that_overlap_count_once(router: Router) -> None:
    silent(router)
    for number in range(20):
        answer(router, 2.0 + number / 100, 20)
    assert forgotten(router, 500.0) == []
    answer(router, 4.0, 20)
    assert len(forgotten(router, 500.0)) == 1


@pytest.mark.parametrize(
    "more",
    [{"limit": None}, {"limit": 2_000}, {"priority": 1}, {"objective": Objective.THROUGHPUT}],
    ids=["no limit", "a long one", "less urgent", "for throughput"],
)
def test_a_stream_that_may_go_on_is_waited_for(router: Router, more: dict[str, Any]) -> None:
    silent(router, **more)
    for number in range(9):
        answer(router, 2.0 + number)
    assert forgotten(router, 500.0) == []


def test_trials_show_what_a_quiet_engine_had_time_for(router: Router) -> None:
    """At a token a second there was time for 8 tokens between two trials."""
    stream = silent(router)
    for begun_s in (1.0, 9.0, 17.0, 25.0):
        router.health.proved("a", begun_s, begun_s + 2.0, streamed=True)
        assert forgotten(router, 500.0) == []
    router.health.proved("a", 33.0, 35.0, streamed=True)
    assert forgotten(router, 500.0) == [stream]


def test_an_engine_that_says_it_has_all_its_calls_has_forgotten_no_stream(router: Router) -> None:
    silent(router)
    answer(router, 2.0)
    assert len(all_forgotten(router, 60.5)) == 1
    router.report("a", msgspec.structs.replace(report(), queue=QueueState(running=1)), requested_s=60.0)
    assert all_forgotten(router, 60.5) == []


@pytest.mark.parametrize(("waiting", "are_forgotten"), [(0, True), (1, False), (None, True)])
def test_counts_without_a_report_say_it_too(router: Router, waiting: int | None, *, are_forgotten: bool) -> None:
    early = booked(router, 0.0)
    for _ in range(3):
        overtake(router, 10.0)
    router.no_reports("a")
    router.counted("a", EngineCounts(0, waiting, None), 99.0)
    assert all_forgotten(router) == [early] * are_forgotten


def test_the_only_engine_keeps_a_call_that_it_may_have_forgotten(router: Router) -> None:
    """One address may have several queues, and the call may wait in the busy one."""
    early = booked(router, 0.0)
    for _ in range(3):
        overtake(router, 10.0)
    router.health.unreachable("b")
    assert all_forgotten(router) == []
    router.health.answered("b", {"m": None})
    assert all_forgotten(router) == [early]
