"""Calls that other gateways have sent: they weigh like own ones while the engine has them, and then not at all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.cache_state import CacheState, KvState, OutstandingCall, StoredRun
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.router import Router
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.simulation.simulate import Prompt, SimulatedCall, Simulation
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.types import Call
from tests.invariants import check

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
HASHES = chain([1, 2, 3, 4], 1, 0)


def report(calls: list[OutstandingCall] | None, *ended: int, **fields: object) -> CacheState:
    state = CacheState(
        engine="a", kind="embedded", epoch="1", cursor=1, model="m", block_tokens=16, granularity_tokens=64,
        snapshot=False, stored=[], removed=[], kv=KvState(100, 50, 0), calls=calls, ended=list(ended),
    )  # fmt: skip
    return msgspec.structs.replace(state, **fields)


def other(number: int = 1, *, computed: bool = False, hashes: Sequence[int] = HASHES, **fields: Any) -> OutstandingCall:
    missed_tokens = 0 if computed else 257
    call = OutstandingCall(number, "another", 257, missed_tokens, False, computed, [] if computed else list(hashes))
    return msgspec.structs.replace(call, **fields)


def fleet(gateway_id: str = "own") -> Router:
    router = Router(gateway_id=gateway_id)
    for name in "ab":
        router.add_engine(name, COSTS)
        router.health.answered(name, {"m": None})
        router.report(name, report([], snapshot=True), 0.0)
    return router


def call(hashes: Sequence[int] = HASHES) -> Call:
    return Call("c", "m", 64 * len(hashes) + 1, 64, hashes)


def loads(router: Router) -> tuple[int, int, float]:
    """Calls, tokens that wait and contexts on the first engine."""
    view = router.engines["a"].view
    return view.calls, view.queue.tokens, view.context_tokens


def test_it_waits_decodes_and_ends_as_the_engine_says() -> None:
    router = fleet()
    view = router.engines["a"].view
    router.report("a", report([other()]), 1.0)
    assert (view.calls, view.outstanding, view.reported, view.queue.tokens) == (1, 0, 1, 257)
    assert view.residency.cached_blocks(router.tree.match(HASHES)) == 4, "its prefix is expected"
    check(router)
    router.report("a", report([other(computed=True)]), 2.0)
    assert (view.calls, view.queue.tokens) == (1, 0)
    assert view.context_tokens > 257
    router.report("a", report([], 1), 3.0)
    assert loads(router) == (0, 0, 0.0)
    assert view.residency.cached_blocks(router.tree.match(HASHES)) == 0, "the report would have had its blocks"
    check(router)


def test_a_prefix_that_several_share_is_computed_once() -> None:
    router = fleet()
    router.report("a", report([other(1), other(2), other(3, hashes=chain([1, 2, 8, 9], 1, 0))]), 1.0)
    assert router.engines["a"].view.queue.tokens == 257 + 1 + (257 - 2 * 64)


@pytest.mark.parametrize(("waits", "tokens"), [(True, 257 + 257), (False, 257 + 1)])
def test_an_own_call_computes_its_prefix_for_others_once_it_is_sent(waits: bool, tokens: int) -> None:
    router = fleet()
    booking = router.book(call(), router.select(call(), 0.0), 0.0, waits=waits)
    name = booking.placement.engine_id
    router.report(name, report([other()]), 1.0)
    assert router.engines[name].view.queue.tokens == tokens
    check(router)


@pytest.mark.parametrize(("loaded", "free"), ["ab", "ba"])
def test_a_call_goes_away_from_the_load_of_others(loaded: str, free: str) -> None:
    router = fleet()
    router.report(loaded, report([other()]), 1.0)
    assert router.select(call(chain([9, 9], 1, 0)), 1.0).engine_id == free


def test_own_calls_are_not_counted_twice() -> None:
    router = fleet()
    booking = router.book(call(), router.select(call(), 0.0), 0.0)
    name = booking.placement.engine_id
    router.report(name, report([other(gateway="own")]), 1.0)
    assert (router.engines[name].view.calls, router.engines[name].view.reported) == (1, 0)


@pytest.mark.parametrize("fields", [{"snapshot": True}, {"epoch": "2", "snapshot": True}])
def test_a_snapshot_replaces_what_was_known(fields: dict[str, Any]) -> None:
    router = fleet()
    router.report("a", report([other(1), other(2)]), 1.0)
    router.report("a", report([other(2, computed=True), other(3)], **fields), 2.0)
    assert router.engines["a"].view.reported == 2
    assert router.engines["a"].view.queue.tokens == 257
    check(router)


def test_without_reports_nothing_is_known() -> None:
    router = fleet()
    router.report("a", report([other()]), 1.0)
    router.no_reports("a", is_new=True)
    assert loads(router) == (0, 0, 0.0)
    check(router)


def test_an_adapter_that_does_not_tell_changes_nothing() -> None:
    router = fleet()
    router.report("a", report(None), 1.0)
    assert loads(router) == (0, 0, 0.0)


@pytest.mark.parametrize(
    "call",
    [
        other(missed_tokens=300),
        other(prompt_tokens=-1, missed_tokens=-1),
        other(prompt_tokens=2**60),
        other(hashes=range(5)),
        other(hashes=(1, 1)),
        other(gateway="x" * 9_999),
    ],
    ids=["misses more than it has", "negative", "too long", "more blocks than tokens", "a circle", "a long name"],
)
def test_a_call_that_cannot_be_is_refused(call: OutstandingCall) -> None:
    router = fleet()
    with pytest.raises(ValueError, match="its calls"):
        router.report("a", report([call]), 1.0)
    check(router)


CALLS = st.builds(
    other,
    st.integers(0, 3),
    computed=st.booleans(),
    hashes=st.sampled_from([(), HASHES, HASHES[:2], chain([1, 2, 7], 1, 0), (5, 6)]),
    gateway=st.sampled_from(["another", "own"]),
)
STEPS = st.one_of(
    st.tuples(st.just("report"), st.lists(CALLS, max_size=3), st.lists(st.integers(0, 3), max_size=2)),
    st.tuples(st.just("snapshot"), st.lists(CALLS, max_size=3), st.sampled_from("12")),
    st.tuples(st.just("stored"), st.integers(1, 4), st.just(None)),
    st.tuples(st.just("call"), st.just(None), st.just(None)),
    st.tuples(st.just("end"), st.just(None), st.just(None)),
    st.tuples(st.just("age"), st.integers(1, 200), st.just(None)),
    st.tuples(st.just("lost"), st.booleans(), st.just(None)),
)


@given(st.lists(STEPS, max_size=30))
def test_whatever_is_reported_the_books_hold_and_return_to_zero(steps: list[tuple[str, Any, Any]]) -> None:
    router, now_s, running = fleet(), 0.0, list[Booking]()
    for kind, first, second in steps:
        now_s += 1
        with suppress(ValueError):
            if kind == "report":
                router.report("a", report(first, *second), now_s)
            elif kind == "snapshot":
                router.report("a", report(first, snapshot=True, epoch=second), now_s)
            elif kind == "stored":
                router.report("a", report([], stored=[StoredRun(None, list(HASHES[:first]))]), now_s)
            elif kind == "call":
                running.append(router.book(call(), router.select(call(), now_s), now_s))
            elif kind == "end" and running:
                router.settle(running.pop(), CallUsage(257, 3, 64), now_s)
            elif kind == "age":
                now_s += first
                router.age(now_s)
            elif kind == "lost":
                router.no_reports("a", is_new=first)
        check(router)
    for booking in running:
        router.release(booking, now_s, delivered=False)
    router.no_reports("a", is_new=True)
    router.age(now_s + 1_000)
    assert loads(router) == (0, 0, 0.0)
    check(router)


def test_gateways_before_real_engine_cores_forget_each_others_calls_when_they_end() -> None:
    routers, engines = [Router(gateway_id=name) for name in ("one", "two", "three")], {}
    for name in "ab":
        engines[name] = Engine(EngineSettings(name=name, model="m", kv_tokens=16_000), COSTS)
        for router in routers:
            router.add_engine(name, COSTS)
    root = root_hash("m")
    prompts = [[*range(200), *range(1_000 * number, 1_000 * number + 300)] for number in range(1, 40)]
    calls = [
        SimulatedCall(0.05 * n, Prompt(500, HashChain(16, root, ids), HashChain(64, root, ids)), 10)
        for n, ids in enumerate(prompts)
    ]
    seen: set[int] = set()

    def look(now_s: float) -> None:
        del now_s
        for router in routers:
            check(router)
            seen.update(engine.view.reported for engine in router.engines.values())

    simulation = Simulation(routers[0], engines, "m", more=routers[1:], report_interval_s=0.02, report_delay_s=0.01)
    for tenth in range(30):
        simulation.at(tenth / 10, look)
    simulation.run(calls)
    assert max(seen) > 2, "each saw the calls of the others"
    for router in routers:
        for name, engine in engines.items():
            cursor = router.engines[name].cache.cursor
            router.report(name, engine.cache_state(cursor, router.gateway_id), simulation.now_s)
            view = router.engines[name].view
            assert (view.calls, view.reported, view.queue.tokens, view.context_tokens) == (0, 0, 0, 0.0)
        check(router)
