"""Which tenant of a line goes next, and what a call of a tenant would pass if it joined the line."""

from __future__ import annotations

from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.admission.line import Line
from plait.policy.order import Rank
from tests.policy.admission.asked_calls import Asked, asked, new_line, new_lines, taken, tenants

# What a call passes.


def overtaken(line: Line[Asked], tenant: str) -> float:
    """The part of the line's prefills that a call of the tenant would overtake."""
    found = line.overtaken(tenant)
    return 0.0 if found is None else found.prefill


def test_a_tenant_alone_passes_nothing() -> None:
    line = new_line()
    assert overtaken(line, "a") == 0.0
    line.push(asked("a"))
    assert overtaken(line, "a") == 0.0


def test_a_tenant_passes_all_that_others_have_in_a_line_where_it_has_nothing() -> None:
    line = new_line(asked("a", 900), asked("b", 100), weights={"new": 0.1})
    assert overtaken(line, "new") == 1.0


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        ({}, 0.8),  # 100 ms of b's 900 go before, as a's own 100
        ({"a": 4.0}, 0.875),  # 25 ms
        ({"b": 5.0}, 0.4),  # 500 ms
        ({"b": 20.0}, 0.0),  # all 900 ms
    ],
)
def test_as_much_goes_before_a_call_as_the_weights_allow_beside_its_tenants_own_work(
    weights: dict[str, float], share: float
) -> None:
    line = new_line(asked("a", 60), asked("b", 900), asked("a", 40), weights=weights)
    assert overtaken(line, "a") == pytest.approx(share)


def test_a_tenant_that_has_left_the_line_has_no_weight_in_it() -> None:
    gone = asked("gone", 1)
    line = new_line(asked("a", 100), asked("b", 900), gone, weights={"gone": 50.0})
    assert overtaken(line, "a") == 0.0
    line.remove(gone)
    assert overtaken(line, "a") == pytest.approx(0.8)


def test_each_other_tenant_goes_before_with_its_weight() -> None:
    line = new_line(asked("a", 100), asked("b", 400), asked("c", 500), weights={"c": 2.0})
    assert overtaken(line, "a") == pytest.approx(0.6), "100 ms of b's and 200 ms of c's go before"
    assert overtaken(line, "b") == 0.0
    assert overtaken(line, "c") == 0.0


def test_what_is_taken_or_removed_is_not_passed() -> None:
    first, last = asked("b", 400), asked("b", 300)
    line = new_line(asked("a", 100), first, last)
    assert overtaken(line, "a") == pytest.approx(0.75), "600 ms of 800"
    line.take("b")
    assert overtaken(line, "a") == pytest.approx(0.5), "200 ms of 400"
    line.remove(last)
    assert overtaken(line, "a") == 0.0


def test_calls_and_prefills_are_counted_apart() -> None:
    """One that has long answers has nearly all of the work, and few of the prefills."""
    line = new_line(*(asked("answers", 900, prefill=0.01) for _ in range(9)), asked("prompts", 900))
    assert line.overtaken("new") == pytest.approx((10, 1.0))
    line.push(asked("own", 90))
    share = 1 - 2 * 90 / 9_000  # each of the two tenants gets as much as the own one
    assert line.overtaken("own") == pytest.approx((share * 10, share * 981 / (981 + 90)))


def test_of_tenants_that_wait_one_that_was_served_more_is_passed() -> None:
    shares, (line,) = new_lines(1)
    for call in (asked("answers", 900, prefill=0.1), asked("prompts", 100)):
        line.push(call)
    shares.serve("answers", 10)
    shares.serve("new", 5)
    assert line.overtaken("new") == pytest.approx((1, 90 / 190))


def test_calls_without_a_prefill_are_passed_all_the_same() -> None:
    assert new_line(asked("a", 0)).overtaken("b") == (1, 0.0)


CALLS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 900)), max_size=12)
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from((0.25, 1.0, 7.5)) for name in "abc"})


@given(calls=CALLS, goes=st.lists(st.integers(0, 99), max_size=6), weights=WEIGHTS)
def test_what_is_passed_is_what_the_weights_leave(
    calls: list[tuple[str, int]], goes: list[int], weights: dict[str, float]
) -> None:
    line = new_line(*(asked(*call) for call in calls), weights=weights)
    for which in goes[: len(line)]:
        line.remove(list(line)[which % len(line)])
    work = {name: fsum(call.work_s for call in line if call.tenant == name) for name in "abc"}
    waiting = [name for name in "abc" if work[name]]
    for name in "abc":
        before_s = sum(work[name] * weights[other] / weights[name] for other in waiting if other != name)
        passed_s = max(0.0, sum(work.values()) - work[name] - before_s)
        expected = passed_s / sum(work.values()) if waiting else 0.0
        assert overtaken(line, name) == pytest.approx(expected, abs=1e-9)


# Who goes next.


def test_the_tenants_that_wait_by_share_are_those_furthest_behind_first() -> None:
    shares, (line,) = new_lines(1, {"c": 4.0})
    for name in "abc":
        line.push(asked(name))
    for name, tokens in (("a", 300), ("b", 200), ("c", 1_000)):
        shares.serve(name, tokens)
    assert line.by_share() == ["b", "c", "a"]
    assert line.next_tenant() == "b"
    shares.correct("a", -200)
    assert line.by_share() == ["a", "b", "c"]
    assert line.next_tenant() == "a"


def test_a_tenant_is_before_all_that_wait_only_if_it_is_further_behind() -> None:
    shares, (here, there) = new_lines(2)
    here.push(asked("b"))
    assert not here.is_before_all("new"), "who comes begins beside the one that waits"
    there.push(asked("a"))
    shares.serve("b", 100)
    assert here.is_before_all("a")
    assert not there.is_before_all("b")
    assert here.is_before_all("new"), "it begins at 0, where a waits for another engine"
    shares.serve("a", 100)
    assert not here.is_before_all("a"), "both are at 100"


def test_a_tenant_may_be_taken_before_its_turn_and_pays_for_it() -> None:
    shares, (line,) = new_lines(1)
    calls = [asked("a"), asked("b", 300), asked("b", rank=Rank.LATENCY), asked("a")]
    for call in calls:
        line.push(call)
    assert [line.take("b"), line.take("b")] == [calls[2], calls[1]]
    line.check()
    assert shares.served("b") == 400.0
    line.push(asked("b"))
    assert tenants(taken(line, 2)) == {"a": 2}


@given(calls=CALLS, takes=st.lists(st.none() | st.sampled_from("abc"), max_size=12), weights=WEIGHTS)
def test_whoever_is_taken_the_tenants_stay_in_order(
    calls: list[tuple[str, int]], takes: list[str | None], weights: dict[str, float]
) -> None:
    shares, (line,) = new_lines(1, weights)
    waiting: list[Asked] = []
    for tenant, tokens in calls:
        waiting.append(asked(tenant, tokens))
        line.push(waiting[-1])
    for name in takes:
        here = {call.tenant for call in waiting}
        assert set(line.by_share()) == here
        times = [shares.served(one) for one in line.by_share()]
        assert times == sorted(times)
        if not here or (name is not None and name not in here):
            continue
        assert shares.served(line.next_tenant()) == times[0]
        expected = line.next_tenant() if name is None else name
        call = line.take(name)
        assert call is next(one for one in waiting if one.tenant == expected)
        waiting.remove(call)
        line.check()
