"""How late the loop was between two times, and that no engine is blamed for it."""

from __future__ import annotations

from math import inf

import pytest

from plait.gateway.fleet.booking import Booking, Failure
from plait.gateway.fleet.health import HealthState
from plait.gateway.fleet.router import Router
from plait.gateway.timer import KEPT_S, LoopLag
from plait.policy.types import Call
from tests.gateway.fleet.lettered_prompts import new_router


def late(lag: LoopLag, due_s: float, woke_s: float) -> None:
    lag.ran(due_s, due_s)
    lag.ran(woke_s, inf)


@pytest.mark.parametrize(
    ("since_s", "late_s"), [(0.0, 3.0), (3.9, 3.0), (4.0, 3.0), (5.0, 2.0), (7.0, 0.0), (8.0, 0.0)]
)
def test_a_lag_counts_from_when_something_was_due(since_s: float, late_s: float) -> None:
    lag = LoopLag()
    late(lag, 4.0, 7.0)
    assert lag.since(since_s, 9.0) == pytest.approx(late_s)


def test_lags_add_up_and_small_ones_do_not_count() -> None:
    lag = LoopLag()
    for due_s, woke_s in ((1.0, 1.5), (2.0, 2.1), (3.0, 3.5)):
        late(lag, due_s, woke_s)
    assert lag.since(0.0, 4.0) == pytest.approx(1.0)
    assert lag.since(2.0, 4.0) == pytest.approx(0.5)


def test_a_lag_that_is_not_over_counts_too() -> None:
    lag = LoopLag()
    lag.ran(9.0, 10.0)
    assert lag.since(5.0, 16.0) == 6.0
    assert lag.since(12.0, 16.0) == 4.0
    assert lag.ran(16.0, inf) == 6.0
    assert lag.since(5.0, 16.0) == 6.0


def test_old_lags_are_forgotten() -> None:
    lag = LoopLag()
    for second in range(300):
        late(lag, second, second + 0.5)
    assert lag.since(-1.0, 300.0) == pytest.approx(KEPT_S / 2, abs=1.0)


# Verdicts.


def sent(router: Router, now_s: float, engine_id: str = "a") -> Booking:
    call = Call("c", "m", 100, router.block_tokens, ())
    return router.book(call, router.select(call, now_s, prefer=engine_id), now_s)


@pytest.mark.parametrize(("lag_s", "is_asked"), [(0.0, True), (0.2, True), (80.0, True), (98.0, False)])
def test_an_engine_is_not_quiet_while_the_gateway_does_not_listen(lag_s: float, is_asked: bool) -> None:
    router = new_router("a", "b")
    sent(router, 0.0)
    late(router.health.lag, 100.0 - lag_s, 100.0)
    assert bool(router.health.quiet(100.0)) is is_asked


def test_a_lag_before_the_call_was_sent_excuses_nothing() -> None:
    router = new_router("a", "b")
    late(router.health.lag, 1.0, 60.0)
    sent(router, 70.0)
    assert not router.health.quiet(72.0)
    assert router.health.quiet(73.0)


@pytest.mark.parametrize(("lag_s", "is_hung"), [(0.0, True), (1.0, True), (4.0, False)])
def test_a_trial_without_an_answer_counts_only_if_the_gateway_was_there(lag_s: float, is_hung: bool) -> None:
    router = new_router("a", "b")
    sent(router, 0.0)
    assert router.health.quiet(50.0)
    late(router.health.lag, 58.0 - lag_s, 58.0)
    assert (router.health.hung("a", 50.0, 58.0) is not None) is is_hung


@pytest.mark.parametrize(("lag_s", "state"), [(0.0, HealthState.EJECTED), (1.0, HealthState.UP)])
@pytest.mark.parametrize("cause", ["timeout", "connect_timeout"])
def test_a_timeout_counts_only_if_the_gateway_was_there(cause: str, lag_s: float, state: HealthState) -> None:
    router = new_router("a", "b")
    bookings = [sent(router, 0.0) for _ in range(3)]
    late(router.health.lag, 2.0 - lag_s, 2.0)
    for booking in bookings:
        router.fail(booking, Failure(cause), 2.0)
    assert router.engines["a"].health.state is state


def test_a_refusal_counts_however_late_the_gateway_is() -> None:
    router = new_router("a", "b")
    late(router.health.lag, 0.5, 2.0)
    for booking in [sent(router, 0.0) for _ in range(3)]:
        router.fail(booking, Failure("status_500"), 2.0)
    assert router.engines["a"].health.state is HealthState.EJECTED


def test_a_probe_that_the_gateway_could_not_hear_is_no_silence() -> None:
    router = new_router("a", "b")
    late(router.health.lag, 6.0, 9.0)
    assert router.health.silent("a", 5.0, 9.0) == []
    assert router.health.silent("a", 9.0, 13.0) is not None
