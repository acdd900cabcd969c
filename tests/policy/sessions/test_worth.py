"""Whether sessions are held, by what keeping their contexts is worth."""

from __future__ import annotations

import pytest

from plait.policy.sessions.known import Session
from plait.policy.sessions.worth import LEAST_RETURNS, Caches, Worth
from tests.policy.sessions.gates import COSTS

CACHES = Caches(2, 2_000, COSTS)
"""An engine has 1,000 tokens. A context of 100 takes 110 ms to compute."""


def worth_of(think_s: float, *, sessions: int = 100, returns: int = LEAST_RETURNS) -> Worth:
    """After as many returns, with contexts of 100 tokens and answers of 10, and so many active sessions."""
    worth = Worth(lambda: CACHES)
    for _ in range(returns):
        worth.returned(think_s, 100)
        worth.answered(10)
    active = [Session("", f"{number}", 0.0, calls=1, prefill_s=0.110) for number in range(sessions)]
    worth.judge(active, 0.0)
    return worth


def test_a_context_is_worth_its_place_until_computing_it_costs_as_much() -> None:
    assert CACHES.worth_s(100) == pytest.approx(0.110 * 1_000 / 100)
    assert CACHES._replace(slowness=2.0).worth_s(100) == pytest.approx(2.2)


def test_the_value_and_the_load_by_hand() -> None:
    """Ten sessions fill an engine, so a decode takes 10 x 20 ms. All return before 1.1 s have passed."""
    worth = worth_of(0.5, sessions=10)
    assert worth.value == pytest.approx(1.1 * 1.0 / (0.2 + 0.5))
    assert worth.load == pytest.approx(10 * 0.110 / (2 * (0.5 + 0.2)))


@pytest.mark.parametrize(
    ("think_s", "sessions", "is_closed"),
    [
        (0.5, 100, True),
        (0.5, 10, False),  # the engines have the time to compute all contexts anew
        (5.0, 1000, False),  # nobody is back in time
    ],
)
def test_sessions_are_held_where_there_is_much_to_compute_and_keeping_saves_it(
    think_s: float, sessions: int, *, is_closed: bool
) -> None:
    assert worth_of(think_s, sessions=sessions).is_closed is is_closed


def test_nobody_is_held_until_enough_is_known() -> None:
    assert not worth_of(0.5, returns=LEAST_RETURNS - 1).is_closed


def test_idle_sessions_are_no_load() -> None:
    worth = worth_of(0.5)
    idle = [Session("", f"{number}", 0.0, ended_s=0.0, prefill_s=0.110) for number in range(100)]
    worth.judge(idle, 9.0)
    assert worth.is_closed
    worth.judge(idle, 11.0)
    assert (worth.is_closed, worth.load) == (False, 0.0)


def test_it_opens_later_than_it_closes() -> None:
    worth = worth_of(0.5, sessions=13)
    assert worth.is_closed
    assert worth.load == pytest.approx(1.021, rel=0.001)
    sessions = [Session("", f"{number}", 0.0, calls=1, prefill_s=0.110) for number in range(12)]
    worth.judge(sessions, 1.0)
    assert worth.is_closed
    assert worth.load == pytest.approx(0.943, rel=0.001)
    worth.judge(sessions[:11], 2.0)
    assert not worth.is_closed


def test_it_is_judged_once_a_second_and_only_where_caches_are_known() -> None:
    worth = worth_of(0.5)
    worth.judge([], 0.9)
    assert worth.is_closed
    worth._look = lambda: None
    worth.judge([], 1.0)
    assert (worth.is_closed, worth.caches) == (False, None)
