"""The calls and variables of one request graph. The store owns the nodes; events change them, and a view reads them."""

from __future__ import annotations

from collections.abc import Iterable

from plait.policy.programs.request_graph_effects import Link
from plait.policy.programs.request_graph_node import CallNode, VariableNode
from plait.policy.programs.request_graph_state import (
    CallEvent,
    CallState,
    UnknownCallError,
    VariableEvent,
    VariableState,
)


class GraphStore:
    """Nodes by name, and the number of calls in each state. The graph checks each change before it makes it here.

    `calls` have not ended. `variables` have not been forgotten.
    """

    __slots__ = ("calls", "counts", "variables")

    def __init__(self) -> None:
        self.calls: dict[str, CallNode] = {}
        self.variables: dict[str, VariableNode] = {}
        self.counts = dict.fromkeys((CallState.WAITING, CallState.READY, CallState.RUNNING), 0)

    def call(self, call_id: str) -> CallNode:
        """The node of a call; raises `UnknownCallError`."""
        node = self.calls.get(call_id)
        if node is None:
            raise UnknownCallError(call_id)
        return node

    def variable(self, name: str) -> VariableNode:
        """The node of a variable; makes it if the name is new."""
        node = self.variables.get(name)
        if node is None:
            node = self.variables[name] = VariableNode(name)
        return node

    def add(self, node: CallNode, inputs: Iterable[str], outputs: Iterable[str]) -> tuple[Link, ...]:
        """Add a call, which waits for its inputs that have no value yet. Returns its links."""
        node.inputs = tuple(self.variable(name) for name in inputs)
        for variable in node.inputs:
            variable.consumers[node] = None
            node.missing += variable.state is not VariableState.SET
        self.promise(node, outputs)
        self.calls[node.call_id] = node
        self.counts[node.state] += 1
        before = [Link(producer, node.call_id) for producer in node.producers()]
        return (*before, *(Link(node.call_id, consumer.call_id) for _, consumer in node.edges()))

    def promise(self, node: CallNode, outputs: Iterable[str]) -> None:
        """Make a call the producer of these `outputs`. The call itself need not be added."""
        node.outputs = tuple(self.variable(name) for name in outputs)
        for variable in node.outputs:
            variable.enter(VariableEvent.PROMISE)
            variable.producer = node.call_id

    def enter(self, node: CallNode, event: CallEvent) -> None:
        """A call goes to the state after `event` and stays in the graph. Raises `GraphTransitionError`."""
        before = node.state
        node.enter(event)
        self.counts[before] -= 1
        self.counts[node.state] += 1

    def end(self, node: CallNode, event: CallEvent) -> list[Link]:
        """A call leaves the graph with `event`. Returns its links to the producers that it was waiting for."""
        before = node.state
        node.enter(event)
        self.counts[before] -= 1
        del self.calls[node.call_id]
        cut = [Link(producer, node.call_id) for producer in node.producers()]
        for variable in node.inputs:
            del variable.consumers[node]
            if variable.state is VariableState.EMPTY and not variable.consumers:
                del self.variables[variable.name]  # no call names it any more
        return cut

    def forget(self, variable: str) -> None:
        """Drop a variable that no call names."""
        del self.variables[variable]

    def check(self) -> None:
        """Assert the invariants; for tests."""
        for state, count in self.counts.items():
            assert count == sum(node.state is state for node in self.calls.values())
        for call_id, node in self.calls.items():
            assert node.call_id == call_id
            node.check()
        for name, variable in self.variables.items():
            assert variable.name == name
            variable.check()
            assert all(self.calls[call.call_id] is call for call in variable.consumers)
            if variable.state is VariableState.PENDING:
                assert variable.producer is not None
                assert variable in self.calls[variable.producer].unset
