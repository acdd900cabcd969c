"""One engine's health: after which outcomes it is ejected, when it is tried, and how it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.fleet.health import TRANSITIONS, Health, HealthEvent, HealthLimits, HealthState

ANSWERED, UNREACHABLE = HealthEvent.ANSWERED, HealthEvent.UNREACHABLE


def up(limits: HealthLimits | None = None) -> Health:
    health = Health(limits or HealthLimits())
    assert health.on(HealthEvent.ANSWERED)
    return health


def ejected(now_s: float = 0.0, *, jitter: float = 0.0, retry_after_s: float | None = None) -> Health:
    health = up()
    assert health.eject("status_500", now_s, jitter, retry_after_s)
    return health


# Probes.


def test_an_engine_is_untried_until_it_answers() -> None:
    health = Health()
    assert (health.state, health.on(ANSWERED), health.state) == (HealthState.UNTRIED, True, HealthState.UP)
    assert health.on(ANSWERED) is False


def test_one_refused_probe_takes_it_down_and_one_answer_back() -> None:
    health = up()
    assert (health.on(UNREACHABLE, "closed"), health.state, health.cause) == (True, HealthState.DOWN, "closed")
    assert (health.on(UNREACHABLE), health.state) == (False, HealthState.DOWN)
    assert (health.on(ANSWERED), health.state) == (True, HealthState.UP)


def test_the_table_speaks_of_changes_only() -> None:
    assert all(after is not before for (before, _), after in TRANSITIONS.items())
    assert set(TRANSITIONS.values()) == set(HealthState) - {HealthState.UNTRIED}


def test_probes_grow_apart_up_to_a_maximum_and_start_over() -> None:
    health = up(HealthLimits(probe_s=0.5, max_probe_s=3.0))
    pauses = [health.probe_after_s]
    for _ in range(5):
        health.on(UNREACHABLE)
        pauses.append(health.probe_after_s)
    assert pauses == [0.5, 0.5, 1.0, 2.0, 3.0, 3.0]
    health.on(ANSWERED)
    assert health.probe_after_s == 0.5
    for _ in range(5_000):
        health.on(UNREACHABLE)
    assert health.probe_after_s == 3.0


def test_an_engine_that_has_never_answered_is_probed_every_second() -> None:
    health = Health()
    for _ in range(20):
        health.on(HealthEvent.UNREACHABLE)
        assert health.probe_after_s == 1.0


# Outcomes of calls.


def test_three_failures_in_a_row_are_too_many() -> None:
    health = up()
    assert not health.failed("closed", 0.0)
    assert (health.state, health.cause) == (HealthState.SUSPECT, "closed")
    assert not health.failed("closed", 0.1)
    assert health.failed("closed", 0.2)


def test_a_success_begins_the_row_anew() -> None:
    health = up(HealthLimits(least_calls=1_000))
    for second in range(9):
        assert not health.failed("closed", second)
        assert not health.failed("closed", second)
        assert health.succeeded(second, second)
        assert health.state is HealthState.UP


def test_half_of_the_calls_of_ten_seconds_are_too_many() -> None:
    health = up()
    tripped = []
    for second in range(12):
        health.succeeded(second, second)
        tripped.append(health.failed("closed", second))
    assert tripped == [False] * 4 + [True] * 8, "from ten calls on"


def test_failures_far_apart_are_forgotten() -> None:
    health = up(HealthLimits(consecutive_failures=100))
    assert not any(health.failed("closed", 11.0 * number) for number in range(50))


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=60))
def test_the_window_holds_the_calls_of_the_last_nine_to_ten_seconds(steps: list[tuple[float, bool]]) -> None:
    health, now_s, calls = up(HealthLimits(consecutive_failures=1_000)), 0.0, list[tuple[float, bool]]()
    for pause_s, fails in steps:
        now_s += pause_s
        calls.append((now_s, fails))
        if not fails:
            health.succeeded(now_s, now_s)
            continue
        cuts = [now_s - 10, now_s - 9, *(at_s for at_s, _ in calls if now_s - 10 <= at_s <= now_s - 9)]
        late = [[failed for at_s, failed in calls if at_s >= cut_s] for cut_s in cuts]
        assert health.failed("closed", now_s) in {len(w) >= 10 and sum(w) >= 0.5 * len(w) for w in late}


# Ejection and the way back.


def test_an_ejection_doubles_up_to_five_seconds() -> None:
    health, pauses = up(), []
    now_s = 100.0
    for _ in range(5):
        health.eject("status_500", now_s, 0.0)
        pauses.append(health.next_probe_s - now_s)
        now_s = health.next_probe_s
        assert (health.try_passed(now_s), health.state) == (True, HealthState.PROBATION)
        assert (health.succeeded(now_s, now_s), health.state) == (True, HealthState.UP)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    health.eject("status_500", now_s + 100.0, 0.0)
    assert health.next_probe_s == now_s + 101.0, "a minute without an ejection begins anew"


def test_jitter_takes_up_to_a_quarter() -> None:
    assert ejected(jitter=1.0).next_probe_s == 0.75


@pytest.mark.parametrize(("asked_s", "pause_s"), [(0.2, 1.0), (7.0, 7.0), (9_999.0, 60.0)])
def test_an_engines_retry_after_is_honoured_within_reason(asked_s: float, pause_s: float) -> None:
    assert ejected(retry_after_s=asked_s).next_probe_s == pause_s


def test_failed_trials_grow_apart_counted_from_their_begin() -> None:
    health, pauses = ejected(), []
    for _ in range(4):
        begun_s = health.next_probe_s
        health.try_failed("closed", begun_s, begun_s + 0.4, 0.0)
        pauses.append(health.next_probe_s - begun_s)
    assert pauses == [1.0, 2.0, 3.0, 3.0]
    begun_s = health.next_probe_s
    health.try_failed("closed", begun_s, begun_s + 4.0, 0.0)
    assert health.next_probe_s == begun_s + 4.0, "one that took longer than the pause is followed at once"
    assert health.state is HealthState.EJECTED


def test_two_passed_trials_bring_it_up_without_a_call() -> None:
    health = ejected()
    assert (health.try_passed(1.0), health.state, health.next_probe_s) == (True, HealthState.PROBATION, 2.0)
    assert (health.try_passed(2.0), health.state) == (True, HealthState.UP)


def test_one_failure_on_probation_is_too_many() -> None:
    health = ejected()
    health.try_passed(1.0)
    assert health.failed("closed", 1.5)
    assert health.eject("closed", 1.5, 0.0)
    assert (health.state, health.next_probe_s) == (HealthState.EJECTED, 3.5)


def test_on_probation_it_takes_one_call_at_a_time() -> None:
    health = ejected()
    takes = [health.takes_calls]
    health.try_passed(1.0)
    takes.append(health.takes_calls)
    health.on_trial = True
    takes.append(health.takes_calls)
    assert takes == [False, True, False]


def test_outcomes_of_calls_from_before_an_ejection_do_not_count() -> None:
    health = ejected(5.0)
    assert 4.9 < health.ejected_s <= 5.0
