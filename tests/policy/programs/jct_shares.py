"""The shares of an end-to-end time worked out anew from the whole graph: what those that are kept must be equal to."""

from __future__ import annotations

from collections.abc import Callable
from graphlib import TopologicalSorter

from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import VariableState


def jct_shares(
    graph: RequestGraph, variable: str, left_s: float, predicted_s: Callable[[str], float]
) -> dict[str, float]:
    """Each upstream call's share, in seconds from when it is ready, of what is `left_s` of a JCT until `variable` has
    its value; empty if no call is to produce it (docs/design/clocks.md). O(calls + edges) upstream.

    `predicted_s` is how long a call takes, or for a running one how long it takes yet. A call is due when what follows
    it on the longest path to the variable just fits into the rest: `left_s` is divided in proportion to predicted times
    on the critical path, and calls beside it get the slack that they have. A call's share begins when the last of its
    producers is due, so on no path do the shares add up to more than `left_s`, and none is under the call's proportion.
    """
    producers = _upstream(graph, variable)
    order = tuple(TopologicalSorter(producers).static_order())  # producers first
    times_s = {call_id: predicted_s(call_id) for call_id in order}
    below_s = dict.fromkeys(order, 0.0)
    for call_id in reversed(order):
        for producer in producers[call_id]:
            below_s[producer] = max(below_s[producer], below_s[call_id] + times_s[call_id])
    critical_s = max((below_s[call_id] + times_s[call_id] for call_id in order), default=0.0)
    scale = max(0.0, left_s) / critical_s if critical_s else 0.0
    due_s = {call_id: scale * (critical_s - below_s[call_id]) for call_id in order}
    return {
        call_id: due_s[call_id] - max((due_s[producer] for producer in producers[call_id]), default=0.0)
        for call_id in order
    }


def _upstream(graph: RequestGraph, variable: str) -> dict[str, tuple[str, ...]]:
    """The producers of each call upstream of a variable that is still to be produced."""
    awaited = graph.producer(variable)
    found: dict[str, tuple[str, ...]] = {}
    todo = [awaited] if awaited is not None and graph.variable_state(variable) is VariableState.PENDING else []
    while todo:
        call_id = todo.pop()
        if call_id not in found:
            found[call_id] = tuple(graph.call(call_id).producers())
            todo += found[call_id]
    return found
