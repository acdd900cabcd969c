"""Quiet engines: when a trial asks them, and what follows."""

from __future__ import annotations

import pytest

from plait.gateway.fleet.booking import LATE_S, SEVERAL_STREAMS, SLOTS, Booking, CallUsage, Failure
from plait.gateway.fleet.router import Router
from plait.policy.types import Call
from tests.gateway.fleet.two_engines import HANG_S, booked, two_engines
from tests.invariants import check


@pytest.fixture
def router() -> Router:
    return two_engines()


def is_quiet(router: Router, now_s: float) -> bool:
    check(router)
    return router.engines["a"].progress.is_quiet(now_s)


def test_an_idle_engine_owes_nothing(router: Router) -> None:
    assert not is_quiet(router, 1e6)


def test_a_first_byte_is_late_after_the_patience_for_all_prompts_before_it(router: Router) -> None:
    for _ in range(10):
        booking = booked(router, 0.0, tokens=1_000)
    assert booking.late_s == pytest.approx(LATE_S + 3 * 10 * 1.0)
    assert not is_quiet(router, LATE_S + 3.0), "the first call of the queue is late then"
    assert is_quiet(router, LATE_S + 3.1)


def test_an_answer_that_is_not_streamed_is_late_at_its_end(router: Router) -> None:
    booking = booked(router, 0.0, streamed=False, limit=5_000)
    assert booking.late_s == pytest.approx(LATE_S + 3 * (0.1 + 5.0))
    assert booked(router, 0.0, streamed=False, limit=None).late_s == float("inf")


def test_slots_that_long_answers_take_are_no_silence(router: Router) -> None:
    for _ in range(SLOTS):
        booked(router, 0.0, tokens=1, streamed=False, limit=60_000)
    assert booked(router, 0.0, tokens=1).late_s < 10.0
    assert not is_quiet(router, 60.0), "the last one waits for an answer to end"
    assert is_quiet(router, 200.0)


def test_bytes_of_any_call_show_progress(router: Router) -> None:
    waiting, streaming = booked(router, 0.0), booked(router, 0.0)
    router.first_token(streaming, 1.0)
    router.engines[streaming.placement.engine_id].progress.next_byte(streaming, 20.0)
    assert not is_quiet(router, 22.0)
    assert is_quiet(router, 22.1)
    router.release(waiting, 22.1, delivered=False)
    assert not is_quiet(router, 22.2), "the stream has paused for 19 s before"
    assert is_quiet(router, 40.1), "the stream goes on and says nothing"
    streaming.client_is_slow = True
    assert not is_quiet(router, 40.1), "the silence is the client's"


# Questions.


def asked(router: Router, now_s: float) -> list[str]:
    """The engines that a trial has to ask from now on."""
    return [engine.view.engine_id for engine in router.health.quiet(now_s)]


def stalled(router: Router, now_s: float) -> list[str]:
    """The engines whose trials have no answer for long enough."""
    router.health.stalled(now_s)
    return [engine_id for engine_id, engine in router.engines.items() if engine.stalled]


def hung(router: Router, now_s: float, asked_s: float = 8.0, engine_id: str = "a") -> list[tuple[str, str]]:
    """What becomes of an engine of which a trial since `asked_s` had no answer: its state, and which calls it loses."""
    change = router.health.hung(engine_id, asked_s, now_s)
    return [] if change is None else [(change.after.value, change.aborts.value)]


def test_a_quiet_engine_is_asked_once_and_gets_no_new_calls_until_it_answers(router: Router) -> None:
    booked(router, 0.0)
    assert asked(router, 2.0) == []
    assert asked(router, 8.0) == ["a"]
    assert asked(router, 8.5) == [], "a trial is under way"
    assert stalled(router, 9.0) == []
    assert stalled(router, 9.1) == ["a"]
    assert [engine.view.engine_id for engine in router.health.stalled(9.1)] == [], "told once"
    assert router.select(Call("next", "m", 10, 64, []), 9.1, prefer="a").engine_id == "b"
    router.health.proved("a", 9.1, 9.2, streamed=False)
    assert stalled(router, 9.2) == []
    assert asked(router, 9.2 + HANG_S) == [], "so long it may be silent"
    assert asked(router, 9.3 + HANG_S) == ["a"]


@pytest.mark.parametrize(("streamed", "are_asked"), [(True, []), (False, ["a"])])
def test_a_whole_answer_shows_nothing_of_several_streams(router: Router, streamed: bool, are_asked: list[str]) -> None:
    for _ in range(SEVERAL_STREAMS - 1):
        router.first_token(booked(router, 0.0), 0.1)
    assert asked(router, 8.0) == ["a"]
    router.health.proved("a", 7.9, 8.0, streamed=streamed)
    assert asked(router, 9.0) == []
    router.first_token(booked(router, 9.0, tokens=10), 9.1)
    assert asked(router, 10.0) == are_asked


def test_an_engine_that_was_ejected_has_to_show_a_stream(router: Router) -> None:
    booked(router, 0.0)
    assert asked(router, 8.0) == ["a"]
    assert hung(router, 16.0) == [("ejected", "all")]
    needed = []
    for trial_s in (17.0, 18.0):
        needed.append(router.engines["a"].progress.needs_stream)
        router.health.tried("a", None, trial_s, trial_s + 0.1)
    needed.append(router.engines["a"].progress.needs_stream)
    assert needed == [True, True, False], "the first trial is a whole answer"


@pytest.mark.parametrize(
    ("byte_s", "cause", "aborts"), [(17.5, "timeout", "all"), (18.5, "timeout", "waiting"), (17.5, "broken", "waiting")]
)
def test_a_trial_that_fails_on_probation_frees_the_call_that_is_there(
    router: Router, byte_s: float, cause: str, aborts: str
) -> None:
    booked(router, 0.0)
    assert asked(router, 8.0) == ["a"]
    hung(router, 16.0)
    router.health.tried("a", None, 17.0, 17.1)
    router.engines["a"].progress.byte(byte_s)
    change = router.health.tried("a", Failure(cause), 18.0, 22.0)
    assert change is not None
    assert (change.after.value, change.aborts.value) == ("ejected", aborts)


def test_a_question_is_over_if_the_engine_goes_on_by_itself(router: Router) -> None:
    booking = booked(router, 0.0)
    assert asked(router, 8.0) == ["a"]
    router.first_token(booking, 8.5)
    assert asked(router, 9.0) == []
    assert stalled(router, 9.5) == []
    assert hung(router, 16.5) == []


def test_an_engine_that_answers_no_trial_is_ejected_with_all_its_calls_if_there_is_another(router: Router) -> None:
    booked(router, 0.0)
    assert asked(router, 8.0) == ["a"]
    assert hung(router, 16.0) == [("ejected", "all")]
    assert hung(router, 16.1) == []
    assert asked(router, 17.0) == []
    assert router.models.serving("m") == 1


def test_the_only_engine_is_waited_for(router: Router) -> None:
    router.health.unreachable("b")
    booked(router, 0.0)
    assert asked(router, 8.0) == ["a"]
    assert hung(router, 16.0) == [("suspect", "none")]
    assert hung(router, 24.0, 16.0) == []
    assert router.models.serving("m") == 1


def test_calls_are_not_moved_to_an_engine_that_is_as_silent(router: Router) -> None:
    for engine_id in "ab":
        call = Call("c", "m", 100, 64, [], streamed=True)
        router.book(call, router.select(call, 0.0, prefer=engine_id), 0.0)
    assert asked(router, 8.0) == ["a", "b"]
    assert stalled(router, 9.1) == ["a", "b"]
    assert hung(router, 16.0) == [("suspect", "none")]
    router.health.proved("b", 16.0, 16.1, streamed=False)
    assert stalled(router, 16.1) == ["a"]
    assert hung(router, 24.0, 16.0) == [("ejected", "all")]


def test_what_the_engine_counts_or_reports_shows_that_it_computes(router: Router) -> None:
    stream = booked(router, 0.0)
    router.first_token(stream, 0.1)
    assert asked(router, 8.0) == ["a"]
    router.engines["a"].progress.byte(12.0)
    assert hung(router, 16.0) == []


@pytest.mark.parametrize(
    ("heard_s", "client_is_slow", "are_over"), [(0.1, False, True), (9.0, False, False), (0.1, True, False)]
)
def test_streams_end_if_nothing_is_heard_of_their_engine(
    router: Router, heard_s: float, *, client_is_slow: bool, are_over: bool
) -> None:
    stream = booked(router, 0.0)
    router.first_token(stream, 0.1)
    stream.client_is_slow = client_is_slow
    router.engines["a"].progress.byte(heard_s)
    assert abandoned(router, 45.0) == []
    assert abandoned(router, 45.2) == [stream] * are_over


def abandoned(router: Router, now_s: float) -> list[Booking]:
    """The calls that are not waited for any longer."""
    return router.health.abandoned(now_s)


def test_passed_trials_keep_streams_and_not_calls_that_can_move(router: Router) -> None:
    waiting, streaming = booked(router, 0.0), booked(router, 0.0, limit=None)
    router.first_token(streaming, 0.1)
    for second in range(8, 80, 8):
        router.health.proved("a", second - 0.1, float(second), streamed=False)
    assert waiting.late_s < 3.0
    assert router.health.overdue(47.0) == []
    assert router.health.overdue(48.0) == [waiting]
    assert abandoned(router, 79.0) == []
    assert booked(router, 100.0) not in router.health.overdue(101.0), "it is not late so far"
    router.health.unreachable("b")
    assert router.health.overdue(101.0) == [], "there is no other engine"


# Streams that stand still.


def test_first_bytes_of_new_calls_do_not_hide_streams_that_stand_still(router: Router) -> None:
    for number in range(20):
        begun = booked(router, number / 10, tokens=10)
        router.first_token(begun, number / 10)
        router.engines[begun.placement.engine_id].progress.next_byte(begun, number / 10 + 0.05)
    assert asked(router, 2.0) == []
    assert asked(router, 2.5) == ["a"]
    router.first_token(booked(router, 3.0, tokens=10), 3.5)
    assert asked(router, 4.0) == []
    assert stalled(router, 4.0) == ["a"], "the question is still open"
    assert hung(router, 10.5, 2.5) == [("ejected", "all")]


def test_a_stream_that_goes_on_or_an_answer_that_ends_shows_that_the_engine_decodes(router: Router) -> None:
    streams = [booked(router, 0.0) for _ in range(2)]
    for stream in streams:
        router.first_token(stream, 0.0)
    assert is_quiet(router, 2.5)
    router.engines[streams[0].placement.engine_id].progress.next_byte(streams[0], 2.6)
    assert not is_quiet(router, 6.1), "it has paused for 2.6 s before"
    assert is_quiet(router, 6.3)
    router.settle(streams[0], CallUsage(100, 10), 6.4)
    assert not is_quiet(router, 6.5)
    streams[1].client_is_slow = True
    assert not is_quiet(router, 30.0)


def test_a_stream_may_pause_as_long_as_before(router: Router) -> None:
    """vLLM sends several tokens in an event where it is asked to."""
    stream = booked(router, 0.0)
    router.first_token(stream, 0.0)
    for event in range(1, 4):
        router.engines["a"].progress.next_byte(stream, 1.5 * event)
    assert not is_quiet(router, 6.9)
    assert is_quiet(router, 7.1)


def test_prompts_that_are_computed_explain_why_streams_wait(router: Router) -> None:
    router.first_token(booked(router, 0.0), 0.1)
    begun = booked(router, 0.2, tokens=2_000)
    booked(router, 0.2, tokens=1_000)
    router.first_token(begun, 2.2)
    assert not is_quiet(router, 4.0)
    assert is_quiet(router, 4.2)


def test_a_stalled_engine_gets_calls_if_there_is_no_other(router: Router) -> None:
    router.health.unreachable("b")
    router.first_token(booked(router, 0.0), 0.0)
    assert asked(router, 2.5) == ["a"]
    assert stalled(router, 3.6) == ["a"]
    assert booked(router, 3.6).placement.engine_id == "a"
