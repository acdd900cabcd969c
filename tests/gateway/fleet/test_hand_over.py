"""An engine that drains hands its prefixes over: who gets which call, and how much the others spend on it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.fleet.router import Router
from plait.policy.placement.hand_over import SHARE
from plait.policy.types import Placement
from tests.gateway.fleet.lettered_prompts import COSTS, call, new_router, report

X, Y, Z = "x" * 20, "y" * 20, "z" * 20
TOOK_S = COSTS.prefill_time_s(20 * 64, 0)


def handing_over(*others: str, holds: tuple[str, ...] = (X, Y)) -> Router:
    """Engine a holds some prefixes, and hands them over to the others."""
    router = new_router("a", *others, policy="plait")
    router.report("a", report(*holds), 0.0)
    router.hand_over.begin(router.engines["a"].view, 0.0)
    return router


def ask(router: Router, text: str, now_s: float) -> Placement:
    """A call that is placed, and answered at once."""
    one = call(text)
    placement = router.select(one, now_s)
    booking = router.book(one, placement, now_s)
    router.first_token(booking, now_s)
    router.settle(booking, None, now_s)
    return placement


def test_prefixes_move_one_by_one_as_the_others_have_time() -> None:
    router = handing_over("b")
    assert ask(router, Y, 0.0).engine_id == "b"
    assert [ask(router, X, now_s).engine_id for now_s in (0.0, 1.0, 0.99 * TOOK_S / SHARE)] == ["a"] * 3
    assert ask(router, X, 1.01 * TOOK_S / SHARE).engine_id == "b"
    assert router.hand_over.latest_s("a") == 0.99 * TOOK_S / SHARE


def test_what_the_others_have_as_well_goes_to_them() -> None:
    router = handing_over("b")
    ask(router, X, 0.0)  # b computes it, and has spent its time
    assert [ask(router, text, 0.1).engine_id for text in (X, Z, "x" * 10)] == ["b"] * 3


def test_each_of_the_others_has_time_of_its_own() -> None:
    router = handing_over("b", "c")
    assert {ask(router, text, 0.0).engine_id for text in (X, Y)} == {"b", "c"}


def test_the_last_engine_keeps_all_calls() -> None:
    router = handing_over("b")
    router.health.unreachable("b")
    assert [ask(router, text, 0.0).engine_id for text in (X, Z)] == ["a", "a"]


def test_a_call_avoids_the_engine_that_failed_it() -> None:
    router = handing_over("b")
    ask(router, X, 0.0)
    assert router.select(call(Y), 0.0).engine_id == "a"
    assert router.select(call(Y), 0.0, avoid=["a"]).engine_id == "b"


def test_a_call_that_continues_another_goes_where_its_prefix_is() -> None:
    router = handing_over("b")
    ask(router, X, 0.0)
    assert router.select(call(Y), 0.0, prefer="a").engine_id == "a"
    assert router.select(call(X), 0.0, prefer="a").engine_id == "b"


def test_afterwards_all_is_as_before() -> None:
    router = handing_over("b")
    router.hand_over.end("a")
    assert ask(router, X, 0.0).engine_id == "a"
    assert "a" not in router.hand_over
    router.hand_over.end("a")


@given(st.lists(st.tuples(st.sampled_from("uvwxyz"), st.floats(0.0, 5.0)), max_size=60))
def test_what_is_taken_over_is_a_share_of_the_time(calls: list[tuple[str, float]]) -> None:
    router, now_s, spent_s = handing_over("b", holds=tuple(letter * 20 for letter in "uvwxyz")), 0.0, 0.0
    for letter, pause_s in calls:
        now_s += pause_s
        placement = ask(router, letter * 20, now_s)
        spent_s += TOOK_S if placement.engine_id == "b" and placement.missed_tokens > 64 else 0.0
        assert spent_s <= SHARE * now_s + TOOK_S + 1e-9
