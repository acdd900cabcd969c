"""How long waiting work takes to leave: by the number of engines first, then by what was seen."""

from __future__ import annotations

import pytest

from plait.gateway.admission.backlog import FIRST_S, SMOOTHING_S, DrainRate


def leave(rate: DrainRate, work_s: float, from_s: float, to_s: float) -> None:
    """A call of `work_s` leaves each tenth of a second."""
    for number in range(round(10 * from_s), round(10 * to_s)):
        rate.left(work_s, number / 10)


@pytest.mark.parametrize(("engines", "seconds"), [(1, 30.0), (4, 7.5), (0, 30.0)])
def test_until_calls_have_left_each_engine_does_a_second_of_work_in_a_second(engines: int, seconds: float) -> None:
    rate = DrainRate(engines)
    assert (rate.seconds(30.0), rate.is_measured) == (seconds, False)


def test_a_drain_rate_corrects_predicted_work() -> None:
    rate = DrainRate()
    leave(rate, 3.0, 0.0, 10.0)  # thirty seconds of work a second
    assert rate.is_measured
    assert rate.seconds(30.0) == pytest.approx(1.0, rel=0.1)


def test_the_first_seconds_say_nothing_yet() -> None:
    rate = DrainRate(2)
    leave(rate, 0.003, 0.0, FIRST_S)
    assert (rate.seconds(30.0), rate.is_measured) == (15.0, False)
    leave(rate, 3.0, FIRST_S, FIRST_S + 0.2)
    assert rate.is_measured


def test_a_pause_is_no_slow_rate() -> None:
    rate = DrainRate()
    leave(rate, 3.0, 0.0, 10.0)
    rate.pause()
    leave(rate, 3.0, 1_000.0, 1_010.0)
    assert rate.seconds(30.0) == pytest.approx(1.0, rel=0.1)


def test_a_rate_that_falls_is_followed_within_some_smoothing_times() -> None:
    rate = DrainRate()
    leave(rate, 3.0, 0.0, 10.0)
    leave(rate, 0.3, 10.0, 10.0 + SMOOTHING_S / 2)
    assert 1.5 < rate.seconds(30.0) < 3.0
    leave(rate, 0.3, 10.0 + SMOOTHING_S / 2, 10.0 + 4 * SMOOTHING_S)
    assert rate.seconds(30.0) == pytest.approx(10.0, rel=0.2)


def test_work_that_stands_still_takes_long_but_not_for_ever() -> None:
    rate = DrainRate()
    leave(rate, 0.0, 0.0, 100.0)
    assert rate.seconds(1.0) == 1_000.0
