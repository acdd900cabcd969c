"""When a prefix gets a replica, and when it loses it, from its calls' queueing times in the halves of a window."""

from __future__ import annotations

from itertools import count

import pytest

from benchmarks.placing.rebalancing import LEAST_CALLS, Replicas
from benchmarks.placing.routes import Routes, RouteState
from benchmarks.tests.test_rebalancing import new_engine
from plait.policy.costs.engine_view import EngineView
from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import PrefixTree

BLOCK_TOKENS, PREFIX = 10, "sss"
PREFILL_S = 0.030
TAILS = count(0x10000)


def calls(engine: EngineView, tree: PrefixTree, number: int, *, at_s: float, queued_s: float) -> None:
    """Calls through the prefix that waited `queued_s` each."""
    for _ in range(number):
        leaf = tree.insert(chain([ord(letter) for letter in PREFIX] + [next(TAILS)], 1, 0))
        engine.residency.book(leaf)
        entry = engine.ledger.book(leaf, 10, 40, at_s)
        engine.ledger.answered(entry, at_s + entry.prefill_s + queued_s)


def fleet(names: str = "ab") -> tuple[PrefixTree, Routes, Replicas, list[EngineView]]:
    tree, routes = PrefixTree(), Routes()
    return tree, routes, Replicas(routes, BLOCK_TOKENS), [new_engine(name, tree) for name in names]


def rebalance(replicas: Replicas, engines: list[EngineView], now_s: float) -> None:
    """A turn of each engine."""
    for engine in engines:
        for entry in engine.ledger.age(now_s):
            engine.residency.unshare(entry.leaf)
    for _ in engines:
        replicas.rebalance(engines, now_s)


@pytest.mark.parametrize(
    ("early", "late", "early_s", "late_s", "replicated"),
    [
        (LEAST_CALLS, LEAST_CALLS, 0.020, 0.041, True),
        (LEAST_CALLS, LEAST_CALLS, 0.0, 0.031, True),
        (LEAST_CALLS, LEAST_CALLS, 0.021, 0.041, False),  # not twice as long
        (LEAST_CALLS, LEAST_CALLS, 0.010, 0.029, False),  # shorter than the prefix's prefill
        (LEAST_CALLS, LEAST_CALLS - 1, 0.020, 0.100, False),  # too few calls
        (LEAST_CALLS - 1, LEAST_CALLS, 0.020, 0.100, False),
    ],
)
def test_a_prefix_is_replicated_when_its_calls_wait_twice_as_long(
    *, early: int, late: int, early_s: float, late_s: float, replicated: bool
) -> None:
    tree, routes, replicas, engines = fleet()
    calls(engines[0], tree, early, at_s=10.0, queued_s=early_s)
    calls(engines[0], tree, late, at_s=60.0, queued_s=late_s)
    rebalance(replicas, engines, 100.0)
    found = [(route.state, route.home, route.others) for _, route in routes]
    assert found == ([(RouteState.REPLICATED, "a", ("b",))] if replicated else [])


def test_a_fleet_of_one_replicates_nothing() -> None:
    tree, routes, replicas, engines = fleet("a")
    calls(engines[0], tree, 30, at_s=10.0, queued_s=0.0)
    calls(engines[0], tree, 30, at_s=60.0, queued_s=9.0)
    rebalance(replicas, engines, 100.0)
    assert not len(routes)


def test_each_further_replica_takes_a_window() -> None:
    tree, routes, replicas, engines = fleet("abc")
    for at_s, queued_s in ((10.0, 0.0), (60.0, 1.0), (110.0, 1.0), (160.0, 3.0), (210.0, 7.0)):
        calls(engines[0], tree, 30, at_s=at_s, queued_s=queued_s)
    rebalance(replicas, engines, 100.0)
    assert [route.others for _, route in routes] == [("b",)]
    rebalance(replicas, engines, 199.0)
    assert [route.others for _, route in routes] == [("b",)]
    rebalance(replicas, engines, 250.0)
    assert [route.others for _, route in routes] == [("b", "c")]


@pytest.mark.parametrize(
    ("later", "queued_s", "ends"),
    [
        (10, 0.0, True),
        (70, 0.0, False),  # the load is still there: the replica is what keeps the queue short
        (10, 0.5, False),  # the calls still wait
        (0, 0.0, True),
    ],
)
def test_a_replica_ends_when_load_and_waits_are_low_again(*, later: int, queued_s: float, ends: bool) -> None:
    tree, routes, replicas, engines = fleet()
    calls(engines[0], tree, 30, at_s=10.0, queued_s=0.0)
    calls(engines[0], tree, 30, at_s=60.0, queued_s=1.0)
    rebalance(replicas, engines, 100.0)
    assert len(routes) == 1
    calls(engines[0], tree, later, at_s=180.0, queued_s=queued_s)
    rebalance(replicas, engines, 199.0)
    assert len(routes) == 1, "it lasts a window"
    rebalance(replicas, engines, 210.0)
    assert len(routes) == (not ends)
