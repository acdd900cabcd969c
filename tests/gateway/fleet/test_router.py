"""The router as a sequence of events with their times: what each decision sees, and what is left when calls end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from plait.backends.errors import ModelNotFoundError, NoEngineError
from plait.backends.protocol.cache_state import SchedulerState
from plait.gateway.fleet.booking import Booking, BookingState, BookingTransitionError, CallUsage
from plait.gateway.fleet.router import EngineBusyError, Router
from plait.policy.placement.policies import POLICIES
from plait.policy.types import PlacementReason
from tests.gateway.fleet.lettered_prompts import COSTS, cached, call, new_router, report
from tests.invariants import check

# Who is asked.


def test_a_model_that_nobody_knows_is_the_callers_mistake() -> None:
    router = new_router("a")
    with pytest.raises(ModelNotFoundError, match=r"'x' does not exist\. Models served here: m\.") as caught:
        router.select(call("q", "x"), 0.0)
    assert (caught.value.status, caught.value.param) == (404, "model")


def test_a_model_whose_engines_are_down_is_not() -> None:
    router = new_router("a", "b")
    assert router.health.unreachable("a")
    assert not router.health.unreachable("a")
    assert router.select(call("q"), 0.0).engine_id == "b"
    router.health.unreachable("b")
    with pytest.raises(NoEngineError) as caught:
        router.select(call("q"), 0.0)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
    assert router.health.answered("a", {"m": None}) is not None
    assert router.select(call("q"), 0.0).engine_id == "a"


def test_before_any_engine_answered_nothing_is_known() -> None:
    router = Router()
    router.add_engine("a", COSTS)
    with pytest.raises(NoEngineError, match="no answer so far from a") as caught:
        router.models.check("m")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
    assert (router.models.names, router.models.serving("m")) == (set(), 0)


def test_a_model_of_an_engine_that_has_not_answered_may_come() -> None:
    """A stack that restarts: clients are told to come again, and not that their model does not exist."""
    router = Router()
    with pytest.raises(NoEngineError, match="there are no engines so far"):
        router.models.check("m")
    router.add_engine("a", COSTS)
    router.add_engine("b", COSTS)
    router.health.answered("a", {"m": None})
    with pytest.raises(NoEngineError, match="no answer so far from b"):
        router.models.check("n")
    router.health.answered("b", {"o": None})
    router.health.unreachable("b")
    with pytest.raises(ModelNotFoundError, match="Models served here: m, o"):
        router.models.check("n")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_goes_only_where_its_model_is(policy: str) -> None:
    router = new_router("a", "b", "c", policy=policy)
    router.health.answered("b", {"m": None, "n": None})
    router.health.answered("c", {"n": None})
    chosen: dict[str, set[str]] = {"m": set(), "n": set()}
    for number in range(8):
        for model, engines in chosen.items():
            one = call(f"{model}{number}", model)
            placement = router.select(one, 0.0)
            router.book(one, placement, float(number))
            engines.add(placement.engine_id)
    assert chosen == {"m": {"a", "b"}, "n": {"b", "c"}}
    assert (router.models.serving("m"), router.models.serving("n"), router.models.names) == (2, 2, {"m", "n"})
    router.health.answered("b", {"m": None})
    assert (router.models.serving("n"), router.select(call("q", "n"), 0.0).engine_id) == (1, "c")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_avoids_engines_while_there_are_others(policy: str) -> None:
    router = new_router("a", "b", "c", policy=policy)
    router.report("a", report("prefix", snapshot=True), 1.0)
    for number, avoid in enumerate(({"a"}, {"a", "b"}, {"a", "b", "gone"})):
        placement = router.select(call("prefix!"), 0.0, avoid=avoid)
        assert placement.engine_id not in avoid
        router.book(call("prefix!"), placement, float(number))
    assert router.select(call("prefix!"), 0.0, avoid={"a", "b", "c"}).engine_id in router.engines


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_that_continues_another_goes_where_that_ran(policy: str) -> None:
    router = new_router("a", "b", "c", policy=policy)
    router.report("a", report("prefix", snapshot=True), 1.0)
    for engine, cached_tokens in (("a", 6 * 64), ("b", 0)):
        placement = router.select(call("prefix!"), 0.0, prefer=engine)
        assert (placement.engine_id, placement.reason) == (engine, PlacementReason.CONTINUE)
        assert (placement.cached_tokens, placement.missed_tokens) == (cached_tokens, 7 * 64 + 1 - cached_tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_where_it_cannot_continue_the_policy_says_why_it_goes_elsewhere(policy: str) -> None:
    router = new_router("a", "b", policy=policy)
    router.health.unreachable("b")
    reasons = {router.select(call("x"), 0.0, prefer=engine).reason for engine in ("b", "gone")}
    router.health.answered("b", {"m": None})
    reasons.add(router.select(call("x"), 0.0, prefer="b", avoid={"b"}).reason)
    assert reasons == {router.select(call("x"), 0.0).reason}
    assert PlacementReason.CONTINUE not in reasons


def test_the_same_prompt_to_another_model_finds_nothing() -> None:
    router = new_router("a")
    router.health.answered("a", {"m": None, "n": None})
    router.report("a", report("prefix", snapshot=True), 1.0)
    assert router.select(call("prefix!"), 0.0).cached_tokens == 6 * 64
    assert router.select(call("prefix!", "n"), 0.0).cached_tokens == 0


def test_a_models_context_is_the_longest_offered_if_all_say_so() -> None:
    router = new_router("a", "b")
    assert router.models.contexts.get("m") is None
    router.health.answered("a", {"m": 4_096})
    assert router.models.contexts.get("m") is None, "b may take more"
    router.health.answered("b", {"m": 8_192})
    assert router.models.contexts.get("m") == 8_192
    assert router.models.contexts.get("x") is None


# Engines that come and go.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_draining_engine_gets_no_call_not_even_one_that_continues(policy: str) -> None:
    router = new_router("a", "b", policy=policy)
    router.report("a", report("prefix", snapshot=True), 1.0)
    router.health.drain("a")
    for number in range(4):
        placement = router.select(call("prefix!"), 0.0, prefer="a", avoid={"b"} if number else ())
        assert placement.engine_id == "b"
        router.book(call("prefix!"), placement, float(number))
    assert (router.models.serving("m"), router.models.names) == (1, {"m"})
    router.health.drain("a", draining=False)
    assert router.select(call("prefix!"), 0.0, prefer="a").engine_id == "a"


def test_a_model_whose_only_engine_drains_is_unavailable() -> None:
    router = new_router("a")
    router.health.drain("a")
    with pytest.raises(NoEngineError):
        router.select(call("q"), 0.0)


def test_the_cap_on_ejections_counts_a_draining_engine_as_lost() -> None:
    router = new_router("a", "b", "c", "d")
    assert router.models.may_eject(router.engines["a"])
    router.health.drain("b")
    assert router.models.may_eject(router.engines["a"])
    router.health.drain("c")
    assert not router.models.may_eject(router.engines["a"])


def test_an_engine_is_removed_once_it_is_drained() -> None:
    router = new_router("a", "b")
    router.report("a", report("prefix", snapshot=True), 0.0)
    booking = router.book(call("prefix!"), router.select(call("prefix!"), 1.0), 1.0)
    assert booking.placement.engine_id == "a"
    with pytest.raises(EngineBusyError, match="takes calls"):
        router.remove_engine("a")
    router.health.drain("a")
    with pytest.raises(EngineBusyError, match="1 running calls") as caught:
        router.remove_engine("a")
    assert (caught.value.status, caught.value.code) == (409, "engine_busy")
    router.settle(booking, CallUsage(449, 5, 0), 2.0)
    router.remove_engine("a")
    assert (list(router.engines), len(router.tree)) == (["b"], 0)
    check(router)
    assert router.select(call("prefix!"), 0.0, prefer="a").engine_id == "b"


# What a decision sees.


def test_selecting_changes_nothing_and_booking_makes_the_prefix_expected() -> None:
    router = new_router("a", "b")
    first = router.select(call("prompt"), 0.0)
    assert router.select(call("prompt"), 0.0) == first
    assert len(router.tree) == 0
    router.book(call("prompt"), first, 0.0)
    second = router.select(call("prompt?"), 0.0)
    assert (second.engine_id, second.reason) == (first.engine_id, PlacementReason.EXPLOIT)
    assert (second.cached_tokens, second.missed_tokens) == (6 * 64, 64 + 1)


def test_two_equal_engines_take_calls_that_share_nothing_in_turn() -> None:
    router = new_router("a", "b")
    chosen = []
    for text in "wxyz":
        placement = router.select(call(text), 0.0)
        router.book(call(text), placement, 0.0)
        chosen.append(placement.engine_id)
    assert chosen == ["a", "b", "a", "b"]


def test_real_lengths_replace_predicted_ones() -> None:
    router = new_router("a")
    ledger = router.engines["a"].view.ledger
    booking = router.book(call("four"), router.select(call("four"), 0.0), 0.0)
    assert ledger.window_cost_s() == pytest.approx((0.010 + 0.257) + 128 * 0.011)
    router.first_token(booking, 1.0)
    router.settle(booking, CallUsage(prompt_tokens=257, output_tokens=5, cached_tokens=192), 2.0)
    assert ledger.window_cost_s() == pytest.approx((0.010 + 0.065) + 5 * 0.011)
    assert booking.state is BookingState.SETTLED
    assert booking.first_token_s == 1.0


def test_an_engine_that_does_not_tell_what_was_cached_is_taken_to_have_had_what_was_expected() -> None:
    router = new_router("a")
    router.book(call("four"), router.select(call("four"), 0.0), 0.0)
    second = router.book(call("fours"), router.select(call("fours"), 0.0), 0.0)
    router.settle(second, CallUsage(prompt_tokens=321, output_tokens=0), 2.0)
    assert second.entry.prefill_s == pytest.approx(0.010 + 0.065)


def test_an_engine_has_the_slots_of_its_latest_report() -> None:
    router = new_router("a")
    view = router.engines["a"].view
    assert view.slots == 0
    router.report("a", replace(report(snapshot=True), scheduler=SchedulerState(slots=32)), 0.0)
    assert view.slots == 32
    router.no_reports("a")
    assert view.slots == 0, "nobody tells how many it has"
    router.report("a", report(snapshot=True), 1.0)
    assert view.slots == 0, "another adapter does not tell them"


def test_room_is_as_reported_less_what_was_booked_since() -> None:
    router = new_router("a")
    view = router.engines["a"].view
    router.report("a", report(snapshot=True, free=10), 0.0)
    assert view.free_tokens == 160
    booking = router.book(call("a"), router.select(call("a"), 1.0), 1.0)
    assert view.free_tokens == 160 - 65
    taken_back = router.book(call("zz"), router.select(call("zz"), 1.0), 1.0)
    assert view.free_tokens == 0
    router.release(taken_back, 2.0, delivered=False)
    assert view.free_tokens == 160 - 65
    late = router.book(call("zz"), router.select(call("zz"), 2.0), 2.0)
    router.report("a", report(free=8), 2.0)
    router.release(late, 3.0, delivered=False)
    assert view.free_tokens == 128, "the report did not count that call"
    router.settle(booking, CallUsage(65, 1), 3.0)
    assert view.free_tokens == 128


# How a call ends.


def test_a_call_ends_once() -> None:
    router = new_router("a")
    usage = CallUsage(65, 1)
    for end in ("settle", "release"):
        booking = router.book(call("q"), router.select(call("q"), 0.0), 0.0)
        router.first_token(booking, 1.0)
        if end == "settle":
            router.settle(booking, usage, 2.0)
        else:
            router.release(booking, 2.0, delivered=True)
        with pytest.raises(BookingTransitionError, match=r"call-q is .* and cannot become streaming"):
            router.first_token(booking, 3.0)
        with pytest.raises(BookingTransitionError):
            router.settle(booking, usage, 3.0)
        with pytest.raises(BookingTransitionError):
            router.release(booking, 3.0, delivered=False)
        assert booking.first_token_s == 1.0
        assert router.engines["a"].view.outstanding == 0
        check(router)


def test_a_first_token_comes_once() -> None:
    router = new_router("a")
    booking = router.book(call("q"), router.select(call("q"), 0.0), 0.0)
    router.first_token(booking, 1.0)
    with pytest.raises(BookingTransitionError):
        router.first_token(booking, 2.0)
    assert booking.first_token_s == 1.0


def test_a_call_that_was_not_delivered_is_forgotten() -> None:
    router = new_router("a")
    router.report("a", report("pro", snapshot=True), 0.0)
    booking = router.book(call("prompt"), router.select(call("prompt"), 1.0), 1.0)
    router.release(booking, 2.0, delivered=False)
    assert (cached(router, "prompt"), len(router.tree), len(router.engines["a"].view.ledger)) == (3, 3, 0)


def test_a_call_that_aged_out_of_the_window_may_still_be_taken_back() -> None:
    router = new_router("a")
    booking = router.book(call("prompt"), router.select(call("prompt"), 0.0), 0.0)
    router.age(180.0)
    assert len(router.engines["a"].view.ledger) == 1, "the window is closed at its old end"
    router.age(180.1)
    assert (len(router.engines["a"].view.ledger), cached(router, "prompt")) == (0, 6)
    router.release(booking, 181.0, delivered=False)
    assert len(router.tree) == 0
    check(router)


def test_a_refused_call_is_forgotten_unless_the_engine_has_refused_the_one_before() -> None:
    router = new_router("a")
    ledger = router.engines["a"].view.ledger

    def book() -> Booking:
        return router.book(call("q"), router.select(call("q"), 0.0), 0.0)

    def kept_after_refusal() -> bool:
        before, booking = len(ledger), book()
        router.release(booking, 1.0, delivered=False, refused=True)
        check(router)
        return len(ledger) > before

    assert [kept_after_refusal() for _ in range(3)] == [False, True, True]
    router.first_token(streamed := book(), 2.0)
    assert [kept_after_refusal() for _ in range(2)] == [False, True]
    router.settle(streamed, CallUsage(65, 1), 3.0)
    assert not kept_after_refusal()


def test_an_engine_that_refuses_everything_does_not_draw_the_calls() -> None:
    """Each call has a prompt of its own, so that only load decides."""
    router, refused, answered = new_router("broken", "good"), 0, 0
    for number in range(40):
        one = call(chr(1_000 + number))
        booking = router.book(one, router.select(one, float(number)), float(number))
        if booking.placement.engine_id == "broken":
            router.release(booking, number + 0.1, delivered=False, refused=True)
            refused += 1
        else:
            router.settle(booking, CallUsage(65, 128), number + 0.5)
            answered += 1
    assert (refused, answered) == (21, 19), "the first refusal is free; were all free, all calls would go there"
