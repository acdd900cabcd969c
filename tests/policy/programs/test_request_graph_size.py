"""Large request graphs: no recursion, and no search for orders that applications have."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from unittest.mock import Mock

import pytest

from plait.policy.programs import request_graph_state
from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import CallState
from tests.invariants import check
from tests.policy.programs.graph_events import run


def chain(length: int) -> list[tuple[str, list[str], list[str]]]:
    return [(f"c{i}", [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]


def map_reduce(maps: int) -> list[tuple[str, list[str], list[str]]]:
    """A prepared document, a map over it, a reduce, and a chain behind that."""
    parts = [(f"map {i}", ["document"], [f"part {i}"]) for i in range(maps)]
    reduce = ("reduce", [f"part {i}" for i in range(maps)], ["v0"])
    return [("prepare", [], ["document"]), reduce, *chain(20), *parts]


def test_a_call_that_comes_between_two_others_gets_a_rank_between_theirs() -> None:
    graph = RequestGraph()
    graph.add("first", [], ["x"])
    graph.add("other", [], ["y"])
    graph.add("last", ["y", "z"], ["end"])
    graph.add("behind", ["end"], [])
    graph.add("between", ["x"], ["z"])
    ranks = [graph.call(call_id).rank for call_id in ("first", "between", "last", "behind")]
    assert all(rank < above for rank, above in pairwise(ranks))
    check(graph)


@pytest.mark.parametrize(
    ("calls", "walks"),
    [(chain(300), 0), (chain(300)[::-1], 0), (map_reduce(300), 1), (map_reduce(300)[::-1], 1)],
    ids=["chain", "chain backwards", "maps last", "maps first"],
)
def test_arrivals_in_an_order_that_applications_have_are_not_searched(
    calls: list[tuple[str, list[str], list[str]]], walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = Mock(side_effect=request_graph_state._raise_ranks)
    monkeypatch.setattr(request_graph_state, "_raise_ranks", walk)
    graph = RequestGraph()
    for call in calls:
        graph.add(*call)
    check(graph)
    assert walk.call_count == walks


def test_a_long_chain_in_any_order_runs_and_fails_without_recursion() -> None:
    calls = chain(5_000)
    Random(1).shuffle(calls)
    graph = RequestGraph()
    for call in calls:
        graph.add(*call)
    assert graph.set_value("v0").ready == ("c0",)
    assert run(graph, "c0", "v1")[1].ready == ("c1",)
    effects = graph.fail("c1", "no engine")
    assert len(effects.ended) == 4_999
    last = effects.ended[-1].cause
    assert last is not None
    assert len(list(last)) == last.length == 4_999
    assert [cause.where for cause in last.furthest] == ["c5", "c4", "c3", "c2", "c1"]
    assert last.root.what == "no engine"
    assert repr(last) == "Cause('its input v4999 failed', 'c4999', ...)"
    assert graph.counts[CallState.WAITING] == 0
