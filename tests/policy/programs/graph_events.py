"""Events of a request graph, and what they leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import (
    Cause,
    Effects,
    GraphError,
)


def trail(cause: Cause | None) -> list[tuple[str, str]]:
    return [] if cause is None else [(link.where, str(link.what)) for link in cause]


def unset(graph: RequestGraph, call_id: str) -> tuple[str, ...]:
    """The outputs that a call has still to produce."""
    return tuple(variable.name for variable in graph.call(call_id).unset)


def run(graph: RequestGraph, call_id: str, *outputs: str) -> list[Effects]:
    """A ready call from its start to its end."""
    done = [graph.start(call_id), *(graph.produce(call_id, output) for output in outputs)]
    return done if outputs else [*done, graph.finish(call_id)]


def refused(graph: RequestGraph, event: Callable[[], object], error: type[GraphError], says: str = ".") -> GraphError:
    """The error of an event that leaves the graph as it was. Its message has the words `says`."""
    before = repr(snapshot(graph))
    with pytest.raises(error, match=says) as caught:
        event()
    assert repr(snapshot(graph)) == before
    return caught.value


def snapshot(graph: RequestGraph) -> object:
    return (
        graph.counts,
        {
            name: (variable.state, variable.producer, trail(variable.cause), list(variable.consumers))
            for name, variable in graph.variables.items()
        },
        [
            (node, node.missing, node.produced, [v.name for v in node.inputs], [v.name for v in node.outputs])
            for node in graph.calls.values()
        ],
    )
