"""Rebalancing by its parts: what is added to E2, the routes' states, a prefix's load, and decode balance by cases."""

from __future__ import annotations

from array import array
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placing.prefix_load import prefix_loads
from benchmarks.placing.rebalancing import RebalancedE2, divide, rebalanced_e2, spare_compute
from benchmarks.placing.routes import ROUTE_TRANSITIONS, Route, RouteReason, Routes, RouteState, RouteTransitionError
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.load import LoadLedger
from plait.policy.costs.situation import Situation
from plait.policy.placement.e2 import e2
from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import Node, PrefixTree
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call, PlacementReason
from tests.examples import examples
from tests.policy.placement.test_placement_oracle import BLOCK_TOKENS, ENGINES, PREFIXES, NaiveEngine, Prefix, build

# 1 ms for a token of a prompt, 1 ms for a token of an answer.
COSTS = CostModel(PiecewiseLinear(((0, 0.0),), 0.001), 0.0, 0.0, 0.0, LongAttention())
MECHANISMS = ("decode_balance", "shift", "replicate")


def new_engine(name: str, tree: PrefixTree, costs: CostModel = COSTS) -> EngineView:
    return EngineView(name, costs, LoadLedger(costs, window_s=100.0, prior_output_tokens=0), Residency(name, tree))


def booked(
    engine: EngineView, tree: PrefixTree, prompt: str, missed: int, *, output: int = 0, at_s: float = 0.0
) -> None:
    """A call that ended; its blocks are expected there."""
    leaf = tree.insert(chain([ord(letter) for letter in prompt], 1, 0))
    engine.residency.book(leaf)
    engine.ledger.settle(engine.ledger.book(leaf, missed, 10 * len(prompt), at_s), missed, output)


# What is added to E2.


@settings(deadline=None, max_examples=examples(200))
@given(
    engines=st.lists(ENGINES, min_size=1, max_size=4), prompt=PREFIXES, mechanisms=st.sets(st.sampled_from(MECHANISMS))
)
def test_with_no_routes_only_decode_balance_differs_from_e2(
    engines: list[NaiveEngine], prompt: Prefix, mechanisms: set[str]
) -> None:
    tree = PrefixTree()
    views = [build(str(number), engine, tree) for number, engine in enumerate(engines)]
    call = Call("call", "model", len(prompt) * BLOCK_TOKENS, BLOCK_TOKENS, chain(prompt, 1, 0))
    situation = Situation(tree.match(call.block_hashes), views, 0)
    published, placement = e2(call, situation), rebalanced_e2(mechanisms, BLOCK_TOKENS).place(call, situation)
    if placement.reason is RouteReason.DECODE_BALANCE:
        assert "decode_balance" in mechanisms
        assert published.reason is PlacementReason.EXPLORE
    else:
        assert placement == published


@settings(deadline=None, max_examples=examples(200))
@given(
    engines=st.lists(ENGINES, min_size=2, max_size=4),
    prompt=PREFIXES,
    state=st.sampled_from((RouteState.SHIFTED, RouteState.RETURNING, RouteState.REPLICATED)),
    ends=st.permutations(range(4)),
)
def test_a_route_changes_exploited_engines_only_and_to_eligible_ones_only(
    engines: list[NaiveEngine], prompt: Prefix, state: RouteState, ends: list[int]
) -> None:
    tree = PrefixTree()
    views = [build(str(number), engine, tree) for number, engine in enumerate(engines)]
    call = Call("call", "model", len(prompt) * BLOCK_TOKENS, BLOCK_TOKENS, chain(prompt, 1, 0))
    situation = Situation(tree.match(call.block_hashes), views, 0)
    policy = rebalanced_e2(MECHANISMS[1:], BLOCK_TOKENS)
    home, other = str(ends[0]), str(ends[1])
    for segment in situation.path:
        policy.routes.enter(segment.node, Route(RouteState.SHIFTED, home, (other,), 0.0, 1.0))
        if state is not RouteState.SHIFTED:
            policy.routes.enter(segment.node, Route(state, home, (other,), 0.0, 1.0))
    published, placement = e2(call, situation), policy.place(call, situation)
    assert placement.engine_id in {view.engine_id for view in views}
    if placement != published:
        assert published.reason is PlacementReason.EXPLOIT
        assert placement.reason in (RouteReason.SHIFT, RouteReason.REPLICA)
        assert placement.engine_id in (home, other)
    elif published.reason is PlacementReason.EXPLOIT and state is RouteState.SHIFTED and len(views) == 4:
        last = situation.path[-1]
        assert published.engine_id != home or last.blocks < len(last.node)


# The states of a prefix.


def route(state: RouteState) -> Route:
    return Route(state, "a", ("b",), 0.0, 1.0)


@pytest.mark.parametrize(("before", "after"), list(product(RouteState, RouteState)))
def test_a_step_that_the_table_lacks_changes_nothing(before: RouteState, after: RouteState) -> None:
    routes, node = Routes(), Node(None, 0, array("Q", [1]))
    if before is not RouteState.HOME:
        first = RouteState.REPLICATED if before is RouteState.REPLICATED else RouteState.SHIFTED
        routes.enter(node, route(first))
        if before is not first:
            routes.enter(node, route(before))

    def step() -> None:
        routes.end(node) if after is RouteState.HOME else routes.enter(node, route(after))

    if after in ROUTE_TRANSITIONS[before]:
        step()
        expected = None if after is RouteState.HOME else route(after)
    else:
        with pytest.raises(RouteTransitionError):
            step()
        expected = None if before is RouteState.HOME else route(before)
    assert routes.get(node) == expected


def test_routes_end_with_their_engines_and_their_calls() -> None:
    tree, routes = PrefixTree(), Routes()
    engine = new_engine("a", tree)
    for prompt in ("ss", "tt"):
        booked(engine, tree, prompt, 10)
    used, gone = (tree.match(chain([ord(letter)] * 2, 1, 0))[0].node for letter in "st")
    engine.residency.unshare(gone)
    for node in (used, gone):
        routes.enter(node, route(RouteState.SHIFTED))
    routes.keep([["a", "b"], ["c"]])
    assert [node for node, _ in routes] == [used]
    routes.keep([["a"], ["b", "c"]])
    assert not len(routes)


# The load of a prefix.


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.tuples(PREFIXES, st.integers(0, 50), st.floats(0, 100)), max_size=20))
def test_each_call_counts_for_one_shared_prefix_at_most(calls: list[tuple[Prefix, int, float]]) -> None:
    tree = PrefixTree()
    engine = new_engine("a", tree)
    for prompt, missed, at_s in sorted(calls, key=lambda one: one[2]):
        booked(engine, tree, "".join(map(str, prompt)), missed, output=5, at_s=at_s)
    loads = prefix_loads(engine, 100.0)
    assert sum(load.calls for load in loads.values()) <= len(calls)
    assert sum(load.load_s for load in loads.values()) <= engine.ledger.window_cost_s() + 1e-9
    for node, load in loads.items():
        assert load.calls <= node.holdings["a"].sharers
        assert node.holdings["a"].sharers > 1


def test_a_call_counts_for_the_longest_shared_part_of_its_prompt_and_waits_by_halves() -> None:
    tree = PrefixTree()
    engine = new_engine("a", tree)
    for prompt, at_s, queued_s in (("ssdddda", 0.0, 1.0), ("ssddddb", 60.0, 3.0), ("sseeeee", 70.0, 9.0)):
        leaf = tree.insert(chain([ord(letter) for letter in prompt], 1, 0))
        engine.residency.book(leaf)
        entry = engine.ledger.book(leaf, 10, 70, at_s)
        engine.ledger.answered(entry, at_s + queued_s + 0.010)
    loads = {node.start_blocks: load for node, load in prefix_loads(engine, 100.0).items()}
    assert (loads[2].calls, loads[0].calls) == (2, 1)
    assert loads[2].mean_waits_s == pytest.approx((1.0, 3.0))
    assert loads[0].mean_waits_s == pytest.approx((0.0, 9.0))


# Decode balance: each engine as (prefill, decode) milliseconds of its window.


@pytest.mark.parametrize(
    ("loads", "spare"),
    [
        (((100, 10), (100, 10)), None),  # nobody mostly decodes
        (((100, 10), (20, 90)), "1"),
        (((10, 100), (10, 100)), None),  # all do: nobody stands out
        (((10, 15), (20, 180)), None),  # the second does, but is overloaded
        (((0, 0), (20, 80)), None),  # an idle engine has more to spare
    ],
)
def test_decode_balance(loads: tuple[tuple[int, int], ...], spare: str | None) -> None:
    tree = PrefixTree()
    engines = [new_engine(str(number), tree) for number in range(len(loads))]
    for engine, (prefill, decode) in zip(engines, loads, strict=True):
        if prefill or decode:
            booked(engine, tree, "", prefill, output=decode)
    chosen = spare_compute(engines)
    assert (chosen and chosen.engine_id) == spare
    policy = RebalancedE2(Routes(), (), spare_compute)
    call = Call("call", "model", 10, 10, chain([1], 1, 0))
    placement = policy.place(call, Situation((), engines, 0))
    assert (placement.reason is RouteReason.DECODE_BALANCE) == (spare is not None)
    assert spare is None or placement.engine_id == spare


# Dividing a subtree.


@settings(deadline=None, max_examples=examples(100))
@given(sharers=st.lists(st.integers(1, 6), min_size=1, max_size=6), holders=st.integers(2, 3))
def test_a_subtree_is_divided_by_calls(sharers: list[int], holders: int) -> None:
    tree = PrefixTree()
    engines = [new_engine(str(number), tree) for number in range(holders)]
    for child, calls in enumerate(sharers):
        for number in range(calls):
            booked(engines[0], tree, f"sss{child}{number}", 10)
    booked(engines[0], tree, "sss", 10)
    node = tree.match(chain([ord("s")] * 3, 1, 0))[0].node
    parts = divide(node, engines[0], engines)
    weights = dict.fromkeys((engine.engine_id for engine in engines), 0)
    for first, engine_id in parts.items():
        weights[engine_id] += node.children[first].holdings["0"].sharers
    assert sum(weights.values()) == sum(calls for calls in sharers if calls > 1)
    largest = max((calls for calls in sharers if calls > 1), default=0)
    assert max(weights.values()) - min(weights.values()) <= largest
