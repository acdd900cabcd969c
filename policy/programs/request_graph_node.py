"""The nodes of a request graph, calls and variables, and the ranks that keep it free of cycles as it grows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush

from plait.policy.programs.request_graph_state import (
    CALL_TRANSITIONS,
    VARIABLE_TRANSITIONS,
    CallEvent,
    CallState,
    Cause,
    CycleError,
    VariableEvent,
    VariableState,
    next_state,
)


class VariableNode:
    """A semantic variable. `producer` is the client, or the id of a call, which may have ended; None while it is empty.

    `consumers` are the calls that take the variable and have not ended, in the order in which they were added.
    """

    __slots__ = ("cause", "consumers", "name", "producer", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = VariableState.EMPTY
        self.producer: str | None = None
        self.cause: Cause | None = None
        self.consumers: dict[CallNode, None] = {}

    def __repr__(self) -> str:
        return f"VariableNode({self.name!r}, {self.state}, producer={self.producer!r})"

    def enter(self, event: VariableEvent) -> None:
        """Go to the state after `event`, or raise `GraphTransitionError`."""
        self.state = next_state(VARIABLE_TRANSITIONS, self.state, event, "variable", self.name)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert (self.state is VariableState.EMPTY) == (self.producer is None)
        assert (self.state is VariableState.FAILED) == (self.cause is not None)
        assert not self.consumers or self.state is not VariableState.FAILED
        assert self.consumers or self.state is not VariableState.EMPTY, f"{self} was left behind"
        assert all(self in call.inputs for call in self.consumers)


class CallNode:
    """A call that has not ended. `missing` of its inputs have no value. `produced` of its outputs have a value.

    `rank` is higher than the rank of every call whose output this call waits for. `is_native` says that it is a native
    step: the client computes its output, and no engine runs it.
    """

    __slots__ = ("call_id", "inputs", "is_native", "missing", "outputs", "produced", "rank", "state")

    def __init__(self, call_id: str, *, is_native: bool = False) -> None:
        self.call_id = call_id
        self.is_native = is_native
        self.state = CallState.WAITING
        self.inputs: tuple[VariableNode, ...] = ()
        self.outputs: tuple[VariableNode, ...] = ()
        self.missing = 0
        self.produced = 0
        self.rank = 0

    def __repr__(self) -> str:
        return f"CallNode({self.call_id!r}, {self.state}, missing={self.missing}, rank={self.rank})"

    def enter(self, event: CallEvent) -> None:
        """Go to the state after `event`, or raise `GraphTransitionError`."""
        self.state = next_state(CALL_TRANSITIONS, self.state, event, "call", self.call_id)

    @property
    def due(self) -> VariableNode | None:
        """The output that the call has to produce next; None if it has no outputs."""
        return self.outputs[self.produced] if self.outputs else None

    @property
    def unset(self) -> tuple[VariableNode, ...]:
        """The outputs that the call has still to produce, the next first."""
        return self.outputs[self.produced :] if self.produced else self.outputs

    def producers(self) -> Iterator[str]:
        """The calls whose outputs this call waits for, once for each such variable."""
        for variable in self.inputs:
            if variable.state is VariableState.PENDING and variable.producer is not None:
                yield variable.producer

    def edges(self) -> Iterator[Edge]:
        """Each call that waits for an output of this call, with the variable between them."""
        return ((variable, consumer) for variable in self.unset for consumer in variable.consumers)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self.missing == sum(variable.state is not VariableState.SET for variable in self.inputs)
        assert (self.state is CallState.WAITING) == (self.missing > 0)
        assert all(self in variable.consumers for variable in self.inputs)
        assert all(variable.state is VariableState.SET for variable in self.outputs[: self.produced])
        assert all(variable.state is VariableState.PENDING for variable in self.unset)
        assert all(variable.producer == self.call_id for variable in self.outputs)
        assert all(self.rank < consumer.rank for _, consumer in self.edges())


Edge = tuple[VariableNode, CallNode]


def ranks_with(
    call: CallNode, producers: Mapping[CallNode, VariableNode], consumers: Iterable[Edge]
) -> dict[CallNode, int]:
    """The ranks to set before the new `call` is linked with its `producers` and `consumers`.

    They are the call's own rank, and new ranks of the calls that must rank above it. Changes nothing. Raises
    `CycleError`.

    As in other incremental topological orders (Pearce and Kelly, 2006), only calls in the wrong order are visited. No
    call is in the wrong order if the new call has no producers, no consumers, or a free rank between them.
    """
    consumers = tuple(consumers)
    floor = max((producer.rank for producer in producers), default=None)
    ceiling = min((consumer.rank for _, consumer in consumers), default=None)
    if floor is None:
        return {call: 0 if ceiling is None else ceiling - 1}
    if ceiling is None or floor + 1 < ceiling:
        return {call: floor + 1}
    return _raise_ranks(call, floor + 1, producers, consumers)


def _raise_ranks(
    call: CallNode, rank: int, producers: Mapping[CallNode, VariableNode], consumers: Iterable[Edge]
) -> dict[CallNode, int]:
    """Raise ranks in ascending order of the old ranks, so that a call's predecessors get theirs before it.

    On a path back to a producer, no rank is above the producer's. So the whole path is visited.
    """
    ranks = {call: rank}
    came_by: dict[CallNode, Edge] = {}
    heap: list[tuple[int, str, CallNode]] = []

    def lift(parent: CallNode, edges: Iterable[Edge]) -> None:
        for variable, consumer in edges:
            if ranks.get(consumer, consumer.rank) <= ranks[parent]:
                if consumer not in ranks:
                    heappush(heap, (consumer.rank, consumer.call_id, consumer))
                ranks[consumer] = ranks[parent] + 1
                came_by[consumer] = (variable, parent)

    lift(call, consumers)
    while heap:
        node = heappop(heap)[2]
        if node in producers:
            raise CycleError((*_path(call, node, came_by), producers[node].name, call.call_id))
        lift(node, node.edges())
    return ranks


def _path(first: CallNode, last: CallNode, came_by: Mapping[CallNode, Edge]) -> tuple[str, ...]:
    names = [last.call_id]
    while last is not first:
        variable, last = came_by[last]
        names += (variable.name, last.call_id)
    return tuple(reversed(names))
