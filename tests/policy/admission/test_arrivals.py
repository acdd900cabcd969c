"""How many calls of each tenant come in a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.admission.arrivals import ArrivalRates
from plait.policy.admission.fair_shares import ACTIVE_S


def arrivals(**times_s: list[float]) -> ArrivalRates:
    made = ArrivalRates()
    for now_s, tenant in sorted((now_s, tenant) for tenant, times in times_s.items() for now_s in times):
        made.came(tenant, now_s)
    return made


def test_a_rate_is_known_after_a_few_calls_and_follows() -> None:
    steady = [number / 4 for number in range(400)]
    assert arrivals(a=steady[:40]).per_s(10.0)["a"] == pytest.approx(4.0, rel=0.02)
    assert arrivals(a=steady).per_s(100.0)["a"] == pytest.approx(4.0, rel=0.02)
    assert arrivals(a=steady).per_s(130.0)["a"] == pytest.approx(4.0 / 2.718, rel=0.06), "after half a minute without"


def test_calls_at_one_moment_count_for_a_second() -> None:
    assert arrivals(a=[5.0] * 7, b=[5.0]).per_s(5.0) == {"a": 7.0, "b": 1.0}


def test_who_has_sent_nothing_for_a_minute_is_forgotten() -> None:
    made = arrivals(a=[0.0], b=[1.0])
    assert made.per_s(ACTIVE_S + 0.5).keys() == {"b"}
    assert not made.per_s(ACTIVE_S + 1.5)


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 50))
def test_no_rate_is_more_than_that_of_all_calls_within_a_second(times_s: list[float], later_s: float) -> None:
    assert 0.0 < arrivals(a=times_s).per_s(max(times_s) + later_s)["a"] <= len(times_s)
