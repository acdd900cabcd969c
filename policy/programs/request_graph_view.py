"""A read-only view of a session's request graph (Parrot, 4.2)."""

from __future__ import annotations

from collections.abc import Iterator

from plait.policy.programs.request_graph_state import CallState, Cause, UnknownVariableError, VariableState
from plait.policy.programs.request_graph_store import GraphStore


class RequestGraphView:
    """Answers questions about a request graph, from its store; counts are O(1)."""

    __slots__ = ("_store",)

    def __init__(self, store: GraphStore) -> None:
        self._store = store

    def __contains__(self, call_id: str) -> bool:
        """Whether the call was added and has not ended."""
        return call_id in self._store.calls

    @property
    def waiting_calls(self) -> int:
        """The number of calls that wait for an input."""
        return self._store.counts[CallState.WAITING]

    @property
    def ready_calls(self) -> int:
        """The number of calls that may be started."""
        return self._store.counts[CallState.READY]

    @property
    def running_calls(self) -> int:
        """The number of calls that were started and have not ended."""
        return self._store.counts[CallState.RUNNING]

    @property
    def variables(self) -> int:
        """The number of known variables, in any state."""
        return len(self._store.variables)

    def call_state(self, call_id: str) -> CallState | None:
        """Waiting, ready or running; None for a call that was never added or has ended."""
        node = self._store.calls.get(call_id)
        return None if node is None else node.state

    def is_native(self, call_id: str) -> bool:
        """Whether the client computes the call's output, and no engine. Raises `UnknownCallError`."""
        return self._store.call(call_id).is_native

    def variable_state(self, variable: str) -> VariableState | None:
        """A variable's state; None if no call has named it, or if it was forgotten."""
        node = self._store.variables.get(variable)
        return None if node is None else node.state

    def cause(self, variable: str) -> Cause | None:
        """Why a variable has failed; None if it has not."""
        node = self._store.variables.get(variable)
        return None if node is None else node.cause

    def producer(self, variable: str) -> str | None:
        """The producer of a variable: a call, also one that has produced it or has failed, or `CLIENT`; None without.

        Parrot's GetProducer. A pending variable's producer is in the graph. Another variable's producer may have ended.
        """
        node = self._store.variables.get(variable)
        return None if node is None else node.producer

    def users(self, variable: str) -> tuple[str, ...]:
        """The calls that have not ended and have the variable as input or output. Raises `UnknownVariableError`."""
        node = self._store.variables.get(variable)
        if node is None:
            raise UnknownVariableError(variable)
        users = tuple(consumer.call_id for consumer in node.consumers)
        producer = None if node.producer is None else self._store.calls.get(node.producer)
        if producer is not None and node in producer.outputs:  # another call may have taken the id since
            return (producer.call_id, *users)
        return users

    def producers(self, call_id: str) -> Iterator[str]:
        """The calls whose outputs a call waits for, once for each such variable."""
        return self._store.call(call_id).producers()

    def consumers(self, call_id: str) -> Iterator[str]:
        """The calls that wait for a call's unset outputs, once for each such variable (Parrot's GetConsumers)."""
        return (call.call_id for variable in self._store.call(call_id).unset for call in variable.consumers)

    def unset_outputs(self, call_id: str) -> tuple[str, ...]:
        """The outputs that a call has still to produce, the next first."""
        return tuple(node.name for node in self._store.call(call_id).unset)

    def rank(self, call_id: str) -> int:
        """A call's place in a topological order: above every call whose output the call waits for."""
        return self._store.call(call_id).rank
