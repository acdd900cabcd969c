"""Shift against a second implementation over plain lists, and what its moves keep to."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placing.rebalancing import TH_BAL, Shift
from benchmarks.placing.routes import Routes, RouteState
from benchmarks.tests.test_rebalancing import booked, new_engine
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.prefix.prefix_tree import PrefixTree
from tests.examples import examples

BLOCK_TOKENS, PREFIX_BLOCKS = 10, 3
TOKEN_S = 2**-10
"""A power of two, so that sums are exact in any order."""
COSTS = CostModel(PiecewiseLinear(((0, 0.0),), TOKEN_S), 0.0, 0.0, 0.0, LongAttention())
PREFILL_S = PREFIX_BLOCKS * BLOCK_TOKENS * TOKEN_S
Calls = list[tuple[str, int]]
"""The prefix of each call, and the tokens that it computes."""
WINDOWS = st.lists(
    st.lists(st.tuples(st.sampled_from("ABCDEF"), st.integers(1, 60)), max_size=12), min_size=1, max_size=3
)


def moves(windows: list[Calls]) -> list[tuple[str, int, int]]:
    """Each prefix that is moved, from the engine of the first number to that of the second."""
    loads = {number: sum(tokens for _, tokens in calls) * TOKEN_S for number, calls in enumerate(windows)}
    heavy = max(loads, key=lambda number: loads[number])
    found = []
    own = windows[heavy]
    shared = {prefix: sum(n for other, n in own if other == prefix) * TOKEN_S for prefix, _ in own}
    for prefix in sorted(shared, key=lambda one: -shared[one]):
        light = min(loads, key=lambda number: loads[number])
        gap_s = loads[heavy] - loads[light]
        if loads[heavy] <= TH_BAL * loads[light]:
            break
        if [other for other, _ in own].count(prefix) > 1 and 2 * shared[prefix] <= gap_s and gap_s > PREFILL_S:
            found.append((prefix, heavy, light))
            loads[heavy] -= shared[prefix]
            loads[light] += shared[prefix]
    return found


@settings(deadline=None, max_examples=examples(300))
@given(WINDOWS)
def test_it_moves_the_largest_prefixes_that_fit_into_half_of_the_difference(windows: list[Calls]) -> None:
    tree, routes, tails = PrefixTree(), Routes(), count(0x10000)
    engines = [new_engine(str(number), tree, COSTS) for number in range(len(windows))]
    for engine, calls in zip(engines, windows, strict=True):
        for prefix, tokens in calls:
            booked(engine, tree, prefix * PREFIX_BLOCKS + chr(next(tails)), tokens)
    shift = Shift(routes, BLOCK_TOKENS)
    shift.rebalance(engines, 49.0)
    assert not len(routes), "the windows of 100 s are not half full"
    shift.rebalance(engines, 50.0)
    made = [(int(route.home), int(route.others[0]), route.load_s) for _, route in routes]
    expected = moves(windows)
    loads = [route.load_s for _, route in routes]
    if len(set(loads)) == len(loads):  # of equal prefixes, either may come first
        assert [(heavy, light) for heavy, light, _ in made] == [(heavy, light) for _, heavy, light in expected]
    coming = shift.coming_loads(engines, 50.0)
    for node, route in routes:
        assert route.state is RouteState.SHIFTED
        assert node.end_blocks == PREFIX_BLOCKS
        home, other = (next(e for e in engines if e.engine_id == name) for name in (route.home, route.others[0]))
        assert coming[home] >= coming[other] - 1e-9 or len(made) > 1
    assert sum(coming.values()) == pytest.approx(sum(engine.ledger.window_cost_s() for engine in engines))
    before = list(routes)
    shift.rebalance(engines, 51.0)
    assert list(routes)[: len(before)] == before, "what was moved stays a window"
