"""What is known of a session's calls and variables (Parrot, 4.2): for those who plan by it and change nothing."""

from __future__ import annotations

from collections.abc import Iterator

from plait.policy.programs.request_graph_node import CallNode, VariableNode
from plait.policy.programs.request_graph_state import (
    CallState,
    Cause,
    UnknownCallError,
    UnknownVariableError,
    VariableState,
)


class RequestGraphView:
    """The reading half of `RequestGraph`; counts are O(1)."""

    __slots__ = ("_calls", "_counts", "_variables")

    def __init__(self) -> None:
        self._calls: dict[str, CallNode] = {}
        self._variables: dict[str, VariableNode] = {}
        self._counts = dict.fromkeys((CallState.WAITING, CallState.READY, CallState.RUNNING), 0)

    def __contains__(self, call_id: str) -> bool:
        """Whether the call is in the graph: added, and not ended."""
        return call_id in self._calls

    def __repr__(self) -> str:
        counts = ", ".join(f"{state}={count}" for state, count in self._counts.items() if count)
        return f"RequestGraph(variables={self.variables}, {counts})"

    @property
    def waiting_calls(self) -> int:
        """Calls that wait for an input."""
        return self._counts[CallState.WAITING]

    @property
    def ready_calls(self) -> int:
        """Calls that may be started."""
        return self._counts[CallState.READY]

    @property
    def running_calls(self) -> int:
        """Calls that were started and have not ended."""
        return self._counts[CallState.RUNNING]

    @property
    def variables(self) -> int:
        """Variables that are known, whatever their state."""
        return len(self._variables)

    def call_state(self, call_id: str) -> CallState | None:
        """Waiting, ready or running; None for a call that was never added or has ended."""
        node = self._calls.get(call_id)
        return None if node is None else node.state

    def variable_state(self, variable: str) -> VariableState | None:
        """None for a variable that nobody has named, or that was forgotten."""
        node = self._variables.get(variable)
        return None if node is None else node.state

    def cause(self, variable: str) -> Cause | None:
        """Why a variable has failed; None if it has not."""
        node = self._variables.get(variable)
        return None if node is None else node.cause

    def producer(self, variable: str) -> str | None:
        """The call that gives or gave the variable its value, or failed to, or `CLIENT`; None if nobody is to.

        Parrot's GetProducer. A pending variable's producer is in the graph, that of another one may have ended.
        """
        node = self._variables.get(variable)
        return None if node is None else node.producer

    def users(self, variable: str) -> tuple[str, ...]:
        """The calls that name a variable, as input or output, and have not ended. Raises `UnknownVariableError`."""
        node = self._variables.get(variable)
        if node is None:
            raise UnknownVariableError(variable)
        users = tuple(consumer.call_id for consumer in node.consumers)
        producer = None if node.producer is None else self._calls.get(node.producer)
        if producer is not None and node in producer.outputs:  # the id may have been taken by another call since
            return (producer.call_id, *users)
        return users

    def producers(self, call_id: str) -> Iterator[str]:
        """The calls whose outputs a call still waits for, once for each such variable."""
        return (producer.call_id for producer in self._producers(self._call(call_id)))

    def consumers(self, call_id: str) -> Iterator[str]:
        """The calls that wait for a call's unset outputs, once for each such variable (Parrot's GetConsumers)."""
        return (consumer.call_id for _, consumer in self._call(call_id).edges())

    def unset_outputs(self, call_id: str) -> tuple[str, ...]:
        """What a call has still to produce, the next one first."""
        return tuple(node.name for node in self._call(call_id).unset)

    def rank(self, call_id: str) -> int:
        """A topological order: higher than the rank of every call whose output the call still waits for."""
        return self._call(call_id).rank

    def _call(self, call_id: str) -> CallNode:
        node = self._calls.get(call_id)
        if node is None:
            raise UnknownCallError(call_id)
        return node

    def _producers(self, node: CallNode) -> Iterator[CallNode]:
        for variable in node.inputs:
            if variable.state is VariableState.PENDING and variable.producer is not None:
                yield self._calls[variable.producer]

    def check(self) -> None:
        """Assert the invariants; for tests."""
        for state, count in self._counts.items():
            assert count == sum(node.state is state for node in self._calls.values())
        for call_id, node in self._calls.items():
            assert node.call_id == call_id
            node.check()
        for name, variable in self._variables.items():
            assert variable.name == name
            variable.check()
            assert all(self._calls[call.call_id] is call for call in variable.consumers)
            if variable.state is VariableState.PENDING:
                assert variable.producer is not None
                assert variable in self._calls[variable.producer].unset
