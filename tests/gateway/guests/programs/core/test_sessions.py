"""Sessions in literal times: whose they are, what they may hold, when they end and who makes room for whom."""

from __future__ import annotations

import gc

import pytest

from plait.backends.errors import LimitError, NotFoundError, SessionEndedError, ValueTooLargeError
from tests.gateway.guests.programs.core.session_calls import Core, Waiting, error
from tests.invariants import check


@pytest.fixture
def core() -> Core:
    return Core()


def test_tenants_do_not_meet(core: Core) -> None:
    mine, theirs = core.session(tenant="a"), core.session(tenant="b")
    core.executor.variables.set_value(mine, "x", "mine", 0.0)
    core.executor.variables.set_value(theirs, "x", "theirs", 0.0)
    assert (mine.values, theirs.values) == ({"x": "mine"}, {"x": "theirs"})
    with pytest.raises(NotFoundError):
        core.executor.sessions.find("c", "s", 0.0)


def test_a_session_that_ends_tells_everybody_and_holds_nothing(core: Core) -> None:
    session, call = core.session(), core.add("A", "x", ["a"], held_bytes=100)
    running = core.add("B", outputs=["b"])
    core.executor.start(running, 0.0)
    waiting = core.get("a")
    core.executor.endings.end(session, "was deleted", 0.0)
    assert {type(error(one)) for one in (call, running)} == {type(waiting.told[0])} == {SessionEndedError}
    core.executor.produce(running, "late", 1.0)
    core.executor.fail(running, "late", 1.0)
    assert (len(core.executor.sessions), core.executor.sessions.tenants) == (0, {})
    core.executor.endings.end(session, "was deleted", 0.0)
    check(core.executor)


def test_an_idle_session_expires_and_an_active_one_does_not() -> None:
    core = Core(ttl_s=10.0)
    idle, used, running = core.session("idle"), core.session("used"), core.session("running")
    core.add("A", outputs=["a"], session=running)
    stuck = core.add("B", "never", session=core.session("stuck"))
    core.session("used", now_s=5.0)
    assert core.executor.endings.expire(9.0) == 0
    assert core.executor.endings.expire(10.0) == 2
    assert [session.ended is None for session in (idle, used, running)] == [False, True, True]
    assert "has expired" in error(stuck).message
    assert core.executor.endings.expire(15.0) == 1
    assert [session.session_id for session in core.executor.sessions] == ["running"]
    check(core.executor)


def test_a_session_may_have_a_time_to_live_of_its_own() -> None:
    core = Core(ttl_s=10.0)
    sessions = core.executor.sessions
    session = sessions.open("t", "s", 0.0, 100.0)
    assert (core.executor.endings.expire(50.0), session.expires_s) == (0, 100.0)
    for now_s in range(50, 60):
        sessions.open("t", "s", float(now_s), 30.0 if now_s % 2 else 20.0)
    assert (core.executor.endings.expire(88.0), core.executor.endings.expire(89.0)) == (0, 1)
    check(core.executor)


def test_many_short_sessions_leave_nothing_behind() -> None:
    core = Core()
    for number in range(500):
        core.executor.endings.end(core.session(f"s{number}"), "was deleted", 0.0)
    check(core.executor)
    assert len(core.executor.sessions._due) <= 65


def test_a_session_that_ends_is_freed_without_the_garbage_collector() -> None:
    core = Core()
    gc.collect()
    gc.disable()
    try:
        for number in range(100):
            session = core.session(f"s{number}")
            core.executor.variables.set_value(session, "x", "1", 0.0)
            core.executor.endings.end(session, "was deleted", 0.0)
        del session
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_limits_are_each_tenants_and_name_themselves() -> None:
    core = Core(max_sessions=1, max_variables=3, max_waiting_calls=1, max_value_bytes=10, max_held_bytes=25)
    session = core.session()
    waiting = core.add("A", "x", ["a"])
    with pytest.raises(LimitError) as caught:
        core.session("another")
    assert (caught.value.status, caught.value.code) == (429, "too_many_sessions")
    core.session(tenant="another")
    with pytest.raises(LimitError) as caught:
        core.add("B", "x")
    assert caught.value.code == "too_many_waiting_calls"
    with pytest.raises(LimitError) as caught:
        core.add("C", outputs=["c", "d"])
    assert caught.value.code == "too_many_variables"
    with pytest.raises(ValueTooLargeError):
        core.executor.variables.set_value(session, "v", "12345678901", 0.0)
    core.executor.variables.set_value(session, "v", "1234567890", 0.0)
    with pytest.raises(LimitError, match="semantic variables"):
        core.executor.variables.set_value(session, "w", "1", 0.0)
    with pytest.raises(ValueTooLargeError):
        core.add("D", held_bytes=16)
    core.executor.leave([waiting], 1.0)
    core.add("B", "y")
    check(core.executor)


def test_a_generated_value_that_is_too_large_is_refused_before_anything_changes() -> None:
    core = Core(max_value_bytes=4)
    call = core.add("A", outputs=["a"])
    core.executor.start(call, 0.0)
    with pytest.raises(ValueTooLargeError):
        core.executor.produce(call, "ééé", 1.0)
    core.executor.fail(call, "too large", 1.0)
    check(core.executor)


# Idle sessions make room, and deleted ones stay deleted.


def test_the_least_recently_touched_idle_session_makes_room() -> None:
    core = Core(max_sessions=3)
    sessions = core.executor.sessions
    busy = core.session("busy")
    held = core.add("A", "x", session=busy)
    core.session("old", now_s=1.0)
    core.session("new", now_s=2.0)
    core.session("old", now_s=3.0)
    core.session("fourth", now_s=4.0)
    assert [session.session_id for session in sessions] == ["busy", "old", "fourth"]
    waiting = Waiting("x")
    core.executor.variables.get(core.session("old", now_s=5.0), waiting.getter, 5.0)
    core.session("fifth", now_s=6.0)
    core.executor.variables.get(core.session("fifth", now_s=6.0), Waiting("y").getter, 6.0)
    with pytest.raises(LimitError):
        core.session("sixth", now_s=7.0)
    core.executor.leave([held], 8.0)
    core.session("sixth", now_s=8.0)
    assert [session.session_id for session in sessions] == ["old", "fifth", "sixth"]
    assert (sessions.evicted, busy.ended is None) == ({"sessions": 3}, False)
    check(core.executor)


def test_an_evicted_session_begins_anew_and_its_bytes_and_variables_are_free() -> None:
    core = Core(max_variables=2, max_held_bytes=20)
    variables, sessions = core.executor.variables, core.executor.sessions
    for name in ("one", "two"):
        variables.set_value(core.session(name), "v", "0123456789", 0.0)
    variables.set_value(core.session("three"), "v", "0123", 1.0)
    assert [session.session_id for session in sessions] == ["two", "three"]
    variables.set_value(core.session("three"), "v2", "0123", 1.0)
    assert [session.session_id for session in sessions] == ["three"]
    variables.set_value(core.session("one"), "w", "012345678901", 2.0)
    assert (core.session("one").values, sessions.evicted) == ({"w": "012345678901"}, {"bytes": 1, "variables": 2})
    with pytest.raises(ValueTooLargeError):
        core.add("B", session=core.session("four"), held_bytes=21)
    assert len(sessions) == 2, "no session is evicted if that is not enough"
    check(core.executor)


def test_a_deleted_session_is_refused_for_its_time_to_live() -> None:
    core = Core(ttl_s=10.0, max_sessions=2)
    for number in range(3):
        core.executor.endings.delete(core.session(f"s{number}", now_s=float(number)), float(number))
    sessions = core.executor.sessions
    assert len(sessions.deleted) == 2
    core.session("s0", now_s=3.0)
    for use in (sessions.open, sessions.find, sessions.label):
        with pytest.raises(SessionEndedError):
            use("t", "s2", 11.9)
    assert sessions.label("t", "s2", 12.0) is None
    core.session("s2", now_s=12.0)
    core.executor.endings.expire(12.0)
    assert len(sessions.deleted) == 0
    check(core.executor)


def test_a_text_beyond_the_limit_is_given_up_and_fails_the_variable() -> None:
    core = Core(max_value_bytes=10)
    call = core.add("A", outputs=["a"])
    core.executor.start(call, 0.0)
    for _ in range(1000):
        core.executor.generated(call, "éé")
        assert core.session().held_bytes <= 10
    assert isinstance(call.text_problem, ValueTooLargeError)
    with pytest.raises(ValueTooLargeError):
        core.executor.produce(call, "short", 0.0)
    core.executor.begin_anew(call)
    core.executor.generated(call, "short")
    core.executor.produce(call, str(call.text), 0.0)
    assert core.session().values == {"a": "short"}
    check(core.executor)
