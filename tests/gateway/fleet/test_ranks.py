"""Data-parallel ranks in the router: what belongs to their address, and what to each of them."""

from __future__ import annotations

import pytest

from plait.backends.protocol.engine_counts import NO_SIZES
from plait.gateway.fleet.booking import Booking, CallUsage, Failure
from plait.gateway.fleet.engine import StockKind
from plait.gateway.fleet.health import Aborts, HealthState
from plait.gateway.fleet.router import EngineBusyError, Router
from plait.policy.costs.delay import CallToPlace, offer
from plait.policy.types import Call
from tests.gateway.fleet.lettered_prompts import report
from tests.gateway.fleet.two_engines import COSTS
from tests.invariants import check

OFFER = {"m": None}


def ranks(address: str, count: int) -> list[str]:
    return [f"{address}@{rank}" for rank in range(count)]


def fleet(addresses: str = "ab", count: int = 2) -> Router:
    """Addresses with as many ranks each, which take calls for m."""
    router = Router("round_robin")
    for address in addresses:
        for name in ranks(address, count):
            router.add_engine(name, COSTS, address=address, host=f"host-{address}")
            router.health.answered(name, OFFER)
    return router


def call_on(router: Router, engine: str, now_s: float = 0.0) -> Booking:
    call = Call("c", "m", 100, 64, [])
    placement = router.select(call, now_s, prefer=engine)
    assert placement.engine_id == engine
    return router.book(call, placement, now_s)


def eject(router: Router, engine: str) -> HealthState:
    for _ in range(3):
        router.fail(call_on(router, engine), Failure("status_500"), 1.0)
    return router.engines[engine].health.state


def takers(router: Router) -> set[str]:
    return {view.engine_id for view in router.models.able("m")}


def test_an_unreachable_address_takes_all_its_ranks() -> None:
    router = fleet()
    changes = router.health.unreachable("a")
    assert [(change.engine_id, change.after, change.aborts) for change in changes] == [
        (name, HealthState.DOWN, Aborts.NONE) for name in ranks("a", 2)
    ]
    assert takers(router) == {*ranks("b", 2)}
    assert router.health.unreachable("a") == []
    router.health.answered("a@1", OFFER)
    assert takers(router) == {"a@1", *ranks("b", 2)}


def test_a_byte_of_any_rank_shows_that_the_address_is_busy() -> None:
    router = fleet()
    booking = call_on(router, "a@1")
    router.first_token(booking, 9.0)
    assert router.health.silent("a", 6.0, 10.0) == []
    assert [change.aborts for change in router.health.silent("a", 10.0, 14.0)] == [Aborts.ALL] * 2


def test_a_rank_that_fails_its_calls_goes_out_alone() -> None:
    router = fleet("a", 2)
    assert eject(router, "a@0") is HealthState.EJECTED
    assert takers(router) == {"a@1"}
    assert eject(router, "a@1") is HealthState.SUSPECT, "the address needs its last rank"


def test_ejections_leave_half_of_the_addresses() -> None:
    router = fleet("abc", 2)
    router.health.unreachable("c")
    assert eject(router, "a@0") is HealthState.EJECTED
    assert eject(router, "a@1") is HealthState.SUSPECT, "one of three addresses would be left"
    assert eject(router, "b@0") is HealthState.EJECTED


def test_a_model_that_a_rank_refuses_is_refused_by_all() -> None:
    router, wrong = fleet(), list[str]()
    router.health.on_wrong_offer = wrong.append
    router.health.lacks("a@1", "m")
    assert (takers(router), wrong) == ({*ranks("b", 2)}, ["a"])


def test_what_one_rank_refuses_the_others_refuse_until_the_address_is_away() -> None:
    router = fleet()
    router.engines["a@1"].refused_fields["reasoning_effort"] = ()
    assert set(router.engines["a@0"].refused_fields) == {"reasoning_effort"}
    assert not router.engines["b@0"].refused_fields
    router.health.unreachable("a")
    assert not router.engines["a@0"].refused_fields


def test_ranks_come_and_go_with_their_calls() -> None:
    router = fleet("a", 2)
    running = call_on(router, "a@1")
    router.add_engine("a", COSTS, address="a")
    (leaving, busy) = router.use_ranks("a", ["a"])
    assert [rank.view.engine_id for rank in (leaving, busy)] == ranks("a", 2)
    router.health.answered("a", OFFER)
    assert takers(router) == {"a"}
    router.remove_engine("a@0")
    with pytest.raises(EngineBusyError):
        router.remove_engine("a@1")
    router.settle(running, CallUsage(100, 5), 1.0)
    router.remove_engine("a@1")
    assert ([*router.engines], [*router.addresses]) == (["a"], ["a"])
    check(router)


def test_new_ranks_of_a_draining_address_drain() -> None:
    router = fleet("a", 1)
    router.health.drain("a")
    router.add_engine("a@1", COSTS, address="a")
    router.use_ranks("a", ranks("a", 2))
    assert all(rank.draining for rank in router.addresses["a"])


def test_an_address_is_removed_whole_or_not_at_all() -> None:
    router = fleet()
    running = call_on(router, "a@1")
    router.health.drain("a")
    with pytest.raises(EngineBusyError):
        router.remove_address("a")
    assert len(router.engines) == 4
    router.release(running, 1.0, delivered=True)
    router.remove_address("a")
    assert ([*router.engines], [*router.addresses]) == (ranks("b", 2), ["b"])


def test_the_ranks_of_an_address_have_one_pace() -> None:
    """Ranks with experts step together: one that only decodes seems slow while its busy siblings do not."""
    router = fleet()
    paces = {name: engine.view.pace for name, engine in router.engines.items()}
    assert paces["a@0"] is paces["a@1"] is not paces["b@0"]


def test_a_retry_prefers_another_host_to_the_ports_of_the_failed_one() -> None:
    router = fleet()
    call = Call("c", "m", 100, 64, [])

    def placed(avoid: set[str]) -> set[str]:
        near = router.neighbours("a@0")
        return {router.select(call, 0.0, avoid=avoid, shun=near).engine_id for _ in range(4)}

    assert placed({"a@0"}) <= {*ranks("b", 2)}
    router.health.unreachable("b")
    assert placed({"a@0"}) == {"a@1"}
    assert placed({*ranks("a", 2)}) <= {*ranks("a", 2)}


def test_a_stock_rank_obeys_on_some_routes_and_one_with_the_adapter_on_all() -> None:
    router = fleet("a", 2)
    for name in ranks("a", 2):
        routes = {"/v1/responses", "/v1/messages"}
        router.health.answered(name, OFFER, routes=routes)
        router.engines[name].stock = StockKind("vllm", NO_SIZES)
    assert not router.models.all_have("m", "/v1/responses")
    assert router.models.all_have("m", "/v1/messages")
    for name in ranks("a", 2):
        router.report(name, report(), 0.0)
    assert router.models.all_have("m", "/v1/responses")


def test_a_prompt_on_one_rank_stalls_the_calls_of_all() -> None:
    """The calls of the siblings count, so a prefix is copied less readily than to a server of its own."""
    router = fleet("ab", 2)
    alone = fleet("ab", 1)
    for made, busy in ((router, "a@1"), (alone, "b@0")):
        for _ in range(8):
            call_on(made, busy)

    def stall_s(made: Router, engine: str) -> float:
        call = Call("c", "m", 1_000, 64, [])
        situation = made.demand.situation(call, [], [made.engines[engine].view], 0.0)
        return offer(CallToPlace.of(call, situation), situation, situation.engines[0]).cost.stall_s

    assert stall_s(alone, "a@0") == 0.0
    assert stall_s(router, "a@0") == stall_s(router, "a@1") > stall_s(router, "b@0") == 0.0
    router.add_engine("a", COSTS, address="a")
    router.use_ranks("a", ["a"])
    assert not router.engines["a"].view.siblings
