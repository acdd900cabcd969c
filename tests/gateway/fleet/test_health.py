from __future__ import annotations

import pytest

from plait.gateway.fleet.health import TRANSITIONS, Health, HealthEvent, HealthState

ANSWERED, UNREACHABLE = HealthEvent.ANSWERED, HealthEvent.UNREACHABLE


def test_an_engine_is_untried_until_it_answers() -> None:
    health = Health()
    assert (health.state, health.on(ANSWERED), health.state) == (HealthState.UNTRIED, True, HealthState.UP)
    assert health.on(ANSWERED) is False


def test_one_failure_takes_it_down_and_one_answer_back() -> None:
    health = Health(state=HealthState.UP)
    assert (health.on(UNREACHABLE), health.state) == (True, HealthState.DOWN)
    assert (health.on(UNREACHABLE), health.state) == (False, HealthState.DOWN)
    assert (health.on(ANSWERED), health.state, health.failures) == (True, HealthState.UP, 0)


def test_every_event_has_an_outcome_in_every_state() -> None:
    assert set(TRANSITIONS) == {(state, event) for state in HealthState for event in HealthEvent}


def test_probes_grow_apart_up_to_a_maximum_and_start_over() -> None:
    health = Health(interval_s=0.5, max_interval_s=3.0)
    pauses = [health.probe_after_s]
    for _ in range(5):
        health.on(UNREACHABLE)
        pauses.append(health.probe_after_s)
    assert pauses == [0.5, 0.5, 1.0, 2.0, 3.0, 3.0]
    health.on(ANSWERED)
    assert health.probe_after_s == 0.5


@pytest.mark.parametrize("failures", [31, 32, 5_000])
def test_an_engine_that_is_gone_for_good_is_still_probed(failures: int) -> None:
    assert Health(failures=failures).probe_after_s == 30.0
