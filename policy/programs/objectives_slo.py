"""Deduced objectives as SLO fields on calls, which is what the schedulers inside the engines understand."""

from __future__ import annotations

from collections.abc import Callable
from graphlib import TopologicalSorter
from typing import Final

from plait.policy.programs.objectives import Deduction
from plait.policy.programs.request_graph_state import VariableState
from plait.policy.programs.request_graph_view import RequestGraphView
from plait.policy.types import Objective, Slo

LATENCY_SLO: Final = Slo(ttft_s=1.0, tpot_s=0.040)
"""A deduced latency call's: 40 ms a token is what Parrot's evaluation (section 8.1) holds latency-sensitive calls to,
and what nobody reads needs no more; one second to the first token is ours, where no queue should be in front of it.
"""

GROUP_STRETCH: Final = 1.95
"""A task group's common JCT over its slowest call's time alone: batches that give 8.2 times the throughput cost 95 %
more latency (Parrot, section 3), and such batches are what a group is for.
"""


def slo_of(
    deduction: Deduction,
    slowest_s: float,
    *,
    own: Slo | None = None,
    asked: Slo | None = None,
    share_s: float | None = None,
    latency: Slo = LATENCY_SLO,
) -> Slo | None:
    """The objectives of a call, in seconds from when it is ready; None: none (Parrot, section 5.2).

    `own` is what it was annotated with, and wins whole. Else a call that is not a latency call has none. One that is
    has its `share_s` of an end-to-end JCT (see `jct_shares`) and the TTFT and TPOT that were `asked` for its output.
    Where nothing explicit reaches it, or the job is late already (`share_s` is nothing or less), a call of a task group
    has the group's common JCT, from `slowest_s`: the longest predicted time, alone on an engine, of the group's calls;
    any other has `latency`.
    """
    if own is not None and own != Slo():
        return own
    if deduction.objective is not Objective.LATENCY:
        return None
    explicit = Slo(
        ttft_s=None if asked is None else asked.ttft_s,
        tpot_s=None if asked is None else asked.tpot_s,
        jct_s=share_s if share_s is not None and share_s > 0 else None,
    )
    if explicit != Slo():
        return explicit
    return latency if deduction.group is None else Slo(jct_s=GROUP_STRETCH * slowest_s)


def jct_shares(
    graph: RequestGraphView, variable: str, left_s: float, predicted_s: Callable[[str], float]
) -> dict[str, float]:
    """Each upstream call's share, in seconds from when it is ready, of what is `left_s` of a JCT until `variable` has
    its value; empty if no call is to produce it (DESIGN 4.8). O(calls + edges) upstream.

    `predicted_s` is how long a call takes, or for a running one how long it takes yet. A call is due when what follows
    it on the longest way to the variable just fits into the rest: `left_s` is divided in proportion to predicted times
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


def _upstream(graph: RequestGraphView, variable: str) -> dict[str, tuple[str, ...]]:
    """The producers of each call upstream of a variable that is still to be produced."""
    awaited = graph.producer(variable)
    found: dict[str, tuple[str, ...]] = {}
    todo = [awaited] if awaited is not None and graph.variable_state(variable) is VariableState.PENDING else []
    while todo:
        call_id = todo.pop()
        if call_id not in found:
            found[call_id] = tuple(graph.producers(call_id))
            todo += found[call_id]
    return found
