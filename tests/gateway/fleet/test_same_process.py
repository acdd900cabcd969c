"""Engines that are one process under two addresses: one of them gets the calls."""

from __future__ import annotations

from array import array

import pytest
from structlog.testing import capture_logs

from plait.backends.errors import NoEngineError
from plait.gateway.fleet.booking import Failure
from plait.gateway.fleet.engine import degradation
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())


@pytest.fixture
def router() -> Router:
    """Engines a and b are one process, and c another."""
    router = Router("least_outstanding")
    for name, process in (("a", "1"), ("b", "1"), ("c", "2")):
        router.add_engine(name, COSTS)
        router.health.answered(name, {"m": None})
        router.health.identified(name, process)
    return router


def call() -> Call:
    return Call("r", "m", 10, 64, array("Q"))


def takers(router: Router) -> str:
    return "".join(sorted(view.engine_id for view in router.models.able("m")))


def problems(router: Router) -> dict[str, str]:
    return {name: said for name, engine in router.engines.items() if (said := degradation(engine)) is not None}


def test_the_first_gets_the_calls(router: Router) -> None:
    placed = [router.book(asked := call(), router.select(asked, 0.0), 0.0).placement.engine_id for _ in range(4)]
    assert sorted(placed) == ["a", "a", "c", "c"]
    assert problems(router) == {"b": "it is engine a under another address, and gets no calls"}
    assert [len(peers) for peers in router.models.peers()] == [2]


def test_that_is_said_once_with_both_names() -> None:
    router = Router()
    with capture_logs() as logs:
        for name in "ab":
            router.add_engine(name, COSTS)
            router.health.answered(name, {"m": None})
        for _ in range(3):
            router.health.identified("a", "1")
            router.health.identified("b", "1")
        router.health.identified("b", "2")
    said = [(line["event"], line["engine"], line["about"]) for line in logs]
    assert said == [("engine differs", "b", "process"), ("engine agrees again", "b", "process")]
    assert "engine a " in logs[0]["problem"]


@pytest.mark.parametrize("goes", ["down", "draining", "another process", "no reports"])
def test_the_other_takes_over(router: Router, goes: str) -> None:
    if goes == "down":
        router.health.unreachable("a")
    elif goes == "draining":
        router.health.drain("a")
    else:
        router.health.identified("a", "3" if goes == "another process" else None)
    assert takers(router) == ("abc" if goes in {"another process", "no reports"} else "bc")
    assert problems(router) == {}
    router.health.answered("a", {"m": None})
    router.health.drain("a", draining=False)
    router.health.identified("a", "1")
    assert takers(router) == "ac"


def fail(router: Router, name: str) -> None:
    """A call fails on an engine, which asks to be left alone."""
    while True:
        booking = router.book(asked := call(), router.select(asked, 0.0), 0.0)
        if booking.placement.engine_id == name:
            router.fail(booking, Failure("status_429", retry_after_s=1.0), 1.0)
            return


def test_an_ejected_process_gets_no_calls_by_its_other_address(router: Router) -> None:
    fail(router, "a")
    assert takers(router) == "c"


def test_the_cap_of_ejections_counts_processes(router: Router) -> None:
    """Of two engines, one may be ejected; of one that is there twice, none."""
    fail(router, "c")
    assert takers(router) == "a"
    fail(router, "a")
    assert takers(router) == "a", "it is only suspect"


def test_no_engine_is_left_if_both_drain(router: Router) -> None:
    for name in "abc":
        router.health.drain(name)
    with pytest.raises(NoEngineError):
        router.select(call(), 0.0)
