"""The fleet's health: who is out, who may be, and who takes the calls meanwhile."""

from __future__ import annotations

import pytest

from plait.backends.errors import NoEngineError
from plait.gateway.fleet.booking import Booking, CallUsage, Failure
from plait.gateway.fleet.health import Aborts, HealthState
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call
from tests.invariants import check

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
USAGE = CallUsage(100, 5)


def fleet(engines: str = "abcd") -> Router:
    router = Router("round_robin")
    for name in engines:
        router.add_engine(name, COSTS)
        router.health.answered(name, {"m": None})
    return router


def call_on(router: Router, engine: str, now_s: float) -> Booking:
    call = Call("c", "m", 100, 64, [1])
    return router.book(call, router.select(call, now_s, prefer=engine), now_s)


def fail(router: Router, engine: str, now_s: float, failure: Failure = Failure("closed")) -> HealthState:  # noqa: B008
    booking = call_on(router, engine, now_s)
    assert booking.placement.engine_id == engine
    router.fail(booking, failure, now_s)
    check(router)
    return router.engines[engine].health.state


def ejected(router: Router, engine: str, now_s: float = 0.0) -> Router:
    for _ in range(3):
        fail(router, engine, now_s)
    assert router.engines[engine].health.state is HealthState.EJECTED
    return router


def test_an_ejected_engine_gets_no_calls() -> None:
    router = ejected(fleet(), "b")
    placed = {router.select(Call("c", "m", 100, 64, [number]), 0.0).engine_id for number in range(8)}
    assert "b" not in placed
    assert router.models.serving("m") == 3


def test_never_more_than_half_are_out() -> None:
    router = ejected(ejected(fleet(), "b"), "c")
    for _ in range(9):
        assert fail(router, "d", 0.0) is HealthState.SUSPECT
    assert router.models.serving("m") == 2


def test_an_engine_that_is_down_counts_as_lost() -> None:
    router = fleet("ab")
    router.health.unreachable("a")
    assert [fail(router, "b", 0.0) for _ in range(5)] == [HealthState.SUSPECT] * 5


def test_the_only_engine_of_a_model_is_never_ejected() -> None:
    router = fleet("a")
    assert [fail(router, "a", 0.0) for _ in range(5)] == [HealthState.SUSPECT] * 5


def test_a_sick_engine_is_better_than_none() -> None:
    router = ejected(fleet("ab"), "a")
    router.health.unreachable("b")
    assert router.select(Call("c", "m", 100, 64, []), 0.0).engine_id == "a"
    router.health.unreachable("a")
    with pytest.raises(NoEngineError):
        router.select(Call("c", "m", 100, 64, []), 0.0)


def test_a_failure_keeps_its_cost_and_nothing_else() -> None:
    router = fleet("ab")
    fail(router, "a", 0.0)
    view = router.engines["a"].view
    assert (len(view.ledger), view.outstanding, view.residency.resident.blocks) == (1, 0, 0)
    router.age(181.0)
    check(router)
    assert (len(view.ledger), len(router.tree)) == (0, 0)


def test_on_probation_one_call_at_a_time() -> None:
    router = ejected(fleet("ab"), "a")
    router.health.tried("a", None, 1.0, 1.0)
    assert router.engines["a"].health.state is HealthState.PROBATION
    trial = call_on(router, "a", 2.0)
    assert trial.placement.engine_id == "a"
    assert call_on(router, "a", 2.0).placement.engine_id == "b"
    change = router.settle(trial, USAGE, 3.0)
    assert change is not None
    assert change.after is HealthState.UP
    assert router.models.serving("m") == 2


def test_a_trial_whose_client_goes_is_followed_by_another() -> None:
    router = ejected(fleet("ab"), "a")
    router.health.tried("a", None, 1.0, 1.0)
    router.release(call_on(router, "a", 2.0), 2.5, delivered=False)
    assert router.engines["a"].health.state is HealthState.PROBATION
    assert call_on(router, "a", 3.0).placement.engine_id == "a"


def test_a_trial_that_fails_ejects_again() -> None:
    router = ejected(fleet("ab"), "a")
    router.health.tried("a", None, 1.0, 1.0)
    assert fail(router, "a", 2.0) is HealthState.EJECTED
    assert router.health.tried("a", Failure("status_500"), 3.0, 3.1) is None
    changes = [router.health.tried("a", None, now_s, now_s) for now_s in (5.0, 6.0)]
    assert [change and change.after for change in changes] == [HealthState.PROBATION, HealthState.UP]


def test_a_trial_that_fails_on_probation_ejects_again() -> None:
    router = ejected(fleet("ab"), "a")
    router.health.tried("a", None, 1.0, 1.0)
    change = router.health.tried("a", Failure("timeout"), 2.0, 6.0)
    assert change is not None
    assert change.after is HealthState.EJECTED


def test_calls_from_before_the_ejection_change_nothing() -> None:
    router = fleet("ab")
    old = [call_on(router, "a", 0.0) for _ in range(6)]
    for booking in old[:3]:
        router.fail(booking, Failure("closed"), 1.0)
    router.health.tried("a", None, 2.0, 2.0)
    router.fail(old[3], Failure("closed"), 3.0)
    router.settle(old[4], USAGE, 3.0)
    router.fail(old[5], None, 3.0)
    assert router.engines["a"].health.state is HealthState.PROBATION
    check(router)


@pytest.mark.parametrize(("moves_waiting", "aborts"), [(True, Aborts.WAITING), (False, Aborts.NONE)])
def test_which_calls_an_ejection_moves(moves_waiting: bool, aborts: Aborts) -> None:
    router = fleet("ab")
    change = router.fail(call_on(router, "a", 0.0), Failure("status_429", moves_waiting, retry_after_s=3.0), 0.0)
    assert change is not None
    assert (change.after, change.aborts) == (HealthState.EJECTED, aborts), "it asked to be left alone"
    assert router.engines["a"].health.next_probe_s == 3.0


def test_an_engine_that_is_silent_is_down_unless_it_is_busy() -> None:
    router = fleet("ab")
    booking = call_on(router, "a", 0.0)
    router.first_token(booking, 9.0)
    assert router.health.silent("a", 6.0, 10.0) == []
    (change,) = router.health.silent("a", 10.0, 14.0)
    assert (change.after, change.aborts) == (HealthState.DOWN, Aborts.ALL)


@pytest.mark.parametrize("usage", [USAGE, None], ids=["with its usage", "without"])
def test_an_answer_is_a_sign_of_life_after_its_call_has_ended(usage: CallUsage | None) -> None:
    router = fleet("ab")
    router.settle(call_on(router, "a", 6.5), usage, 7.0)
    assert router.health.silent("a", 6.0, 10.0) == []
    assert router.health.silent("a", 7.0, 11.0), "nothing has come since the probe began"


def test_a_refused_probe_leaves_its_calls_alone() -> None:
    (change,) = fleet("ab").health.unreachable("a")
    assert change.aborts is Aborts.NONE
