"""The state of a request graph: its calls and variables as nodes, the transitions between their states, and the errors.

A call leaves the graph when it ends. So the states finished, failed and cancelled appear only in the `Effects` of a
call's last event. From these effects the executor starts and answers calls (Parrot, 5.1). The ranks of the nodes keep
the graph free of cycles as it grows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import Final, NamedTuple, Self


class CallState(StrEnum):
    """The states of a call (Parrot, section 5.1)."""

    WAITING = "waiting"  # at least one input has no value
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class CallEvent(StrEnum):
    UNBLOCK = "unblock"  # all its inputs have values now
    START = "start"
    PRODUCE = "produce"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


class VariableState(StrEnum):
    """The states of a semantic variable (Parrot, section 4.1)."""

    EMPTY = "empty"  # calls wait for it, and it has no producer yet
    PENDING = "pending"  # a call that has not ended will produce it
    SET = "set"
    FAILED = "failed"


class VariableEvent(StrEnum):
    PROMISE = "promise"  # a call that will produce it is added
    SET = "set"
    FAIL = "fail"


CALL_TRANSITIONS: Final[Mapping[tuple[CallState, CallEvent], CallState]] = {
    (CallState.WAITING, CallEvent.UNBLOCK): CallState.READY,
    (CallState.WAITING, CallEvent.FAIL): CallState.FAILED,
    (CallState.WAITING, CallEvent.CANCEL): CallState.CANCELLED,
    (CallState.READY, CallEvent.START): CallState.RUNNING,
    (CallState.READY, CallEvent.FAIL): CallState.FAILED,
    (CallState.READY, CallEvent.CANCEL): CallState.CANCELLED,
    (CallState.RUNNING, CallEvent.PRODUCE): CallState.RUNNING,
    (CallState.RUNNING, CallEvent.FINISH): CallState.FINISHED,
    (CallState.RUNNING, CallEvent.FAIL): CallState.FAILED,
    (CallState.RUNNING, CallEvent.CANCEL): CallState.CANCELLED,
}

VARIABLE_TRANSITIONS: Final[Mapping[tuple[VariableState, VariableEvent], VariableState]] = {
    (VariableState.EMPTY, VariableEvent.PROMISE): VariableState.PENDING,
    (VariableState.EMPTY, VariableEvent.SET): VariableState.SET,  # by the client
    (VariableState.PENDING, VariableEvent.SET): VariableState.SET,  # by the call that produces it
    (VariableState.PENDING, VariableEvent.FAIL): VariableState.FAILED,
}

FURTHEST_CAUSES: Final = 5
"""Each cause refers directly to this many causes at the end of its chain, so that no reader walks the whole chain."""


@dataclass(frozen=True, slots=True)
class InputFailed:
    """A call failed because its input `variable` has failed."""

    variable: str

    def __str__(self) -> str:
        return f"its input {self.variable} failed"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cause:
    """Why a call failed: a chain of causes that tells a client which earlier call failed, and why (Parrot, section 7).

    Iterating gives the chain, this cause first and the root last. Chains share their tails and may be as long as the
    graph is deep, so no method recurses.
    """

    what: object
    """A text, or a value with a `str`: at the root the `what` given to `fail`, elsewhere an `InputFailed`."""
    where: str
    """The id of the call."""
    because_of: Cause | None = None
    length: int = field(init=False, default=1)
    """The length of the chain."""
    furthest: tuple[Cause, ...] = field(init=False, default=())
    """The chain's last causes without this one, at most `FURTHEST_CAUSES`, the root last."""

    def __post_init__(self) -> None:
        behind = self.because_of
        if behind is not None:
            short = len(behind.furthest) < FURTHEST_CAUSES
            object.__setattr__(self, "length", behind.length + 1)
            object.__setattr__(self, "furthest", (behind, *behind.furthest) if short else behind.furthest)

    def __iter__(self) -> Iterator[Cause]:
        cause: Cause | None = self
        while cause is not None:
            yield cause
            cause = cause.because_of

    def __str__(self) -> str:
        return ", because ".join(f"{cause.where}: {cause.what}" for cause in self)

    def __repr__(self) -> str:
        return f"Cause({str(self.what)!r}, {self.where!r}{'' if self.because_of is None else ', ...'})"

    @property
    def root(self) -> Cause:
        """The last cause of the chain: the first failure."""
        return self.furthest[-1] if self.furthest else self


class GraphError(Exception):
    """The graph refuses an event and stays as it was."""


class GraphTransitionError(GraphError):
    """The event cannot happen in the state of the call or variable."""

    @classmethod
    def of(cls, kind: str, name: str, state: str, event: str) -> Self:
        return cls(f"{kind} {name!r} is {state}: event {str(event)!r} is not allowed in this state")


def unknown_call(call_id: str) -> GraphError:
    return GraphError(f"no call {call_id!r} is in the graph: it was never added, or it has ended")


def duplicate_call(call_id: str) -> GraphError:
    return GraphError(f"call {call_id!r} is in the graph already: use another id, or wait until that call ends")


class DoubleProducerError(GraphError):
    """A variable has one producer, a call or the client. `first` is the producer; `second` was refused."""

    def __init__(self, variable: str, first: str, second: str) -> None:
        super().__init__(f"variable {variable!r} already has the producer {first!r}: {second!r} needs another variable")
        self.variable = variable
        self.first = first
        self.second = second


class CycleError(GraphError):
    """A call would wait for its own output. `path` is call, variable, call, ... and begins and ends with that call."""

    def __init__(self, path: tuple[str, ...]) -> None:
        super().__init__(f"a call cannot wait for its own output: {' -> '.join(path)}")
        self.path = path


class Ended(NamedTuple):
    """A call that has left the graph; `cause` is None if it finished."""

    call_id: str
    state: CallState
    cause: Cause | None


class Failed(NamedTuple):
    """A variable that will never have a value."""

    variable: str
    cause: Cause


class Link(NamedTuple):
    """A consumer waits for an output of a producer; one link for each variable between them."""

    producer: str
    consumer: str


class Effects(NamedTuple):
    """The changes that one event made, each in a deterministic order."""

    added: str | None = None
    """A new call, which may have failed at once."""

    ready: tuple[str, ...] = ()
    """Calls that may run now, in the order in which they were added."""

    variable_set: str | None = None

    variables_failed: tuple[Failed, ...] = ()
    """The outputs of the call that failed first come first."""

    ended: tuple[Ended, ...] = ()
    """Calls that have left the graph. The one that failed first comes first."""

    linked: tuple[Link, ...] = ()
    """New links. A call that fails when it is added was never linked."""

    cut: tuple[Link, ...] = ()
    """Removed links. Both calls may have ended."""


NO_EFFECTS = Effects()


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
        after = VARIABLE_TRANSITIONS.get((self.state, event))
        if after is None:
            raise GraphTransitionError.of("variable", self.name, self.state, event)
        self.state = after


class CallNode:
    """A call that has not ended.

    - `missing`: how many inputs have no value; `produced`: how many outputs have one.
    - `rank`: higher than the rank of every call whose output this call waits for.
    - `is_native`: a native step, whose output the client computes without an engine.
    - `predicted_s`: the expected time from when the call may run to its end.
    """

    __slots__ = ("call_id", "inputs", "is_native", "missing", "outputs", "predicted_s", "produced", "rank", "state")

    def __init__(self, call_id: str, *, is_native: bool = False, predicted_s: float = 0.0) -> None:
        self.call_id = call_id
        self.is_native = is_native
        self.predicted_s = predicted_s
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
        after = CALL_TRANSITIONS.get((self.state, event))
        if after is None:
            raise GraphTransitionError.of("call", self.call_id, self.state, event)
        self.state = after

    @property
    def due(self) -> VariableNode | None:
        """The output that the call has to produce next; None if it has no outputs."""
        return self.outputs[self.produced] if self.outputs else None

    @property
    def unset(self) -> tuple[VariableNode, ...]:
        """The outputs that the call has still to produce, the next first."""
        return self.outputs[self.produced :] if self.produced else self.outputs

    def producers(self) -> list[str]:
        """The calls whose outputs this call waits for, once for each such variable."""
        pending = VariableState.PENDING
        return [node.producer for node in self.inputs if node.state is pending and node.producer is not None]

    def edges(self) -> list[Edge]:
        """Each call that waits for an output of this call, with the variable between them."""
        return [(variable, consumer) for variable in self.unset for consumer in variable.consumers]


Edge = tuple[VariableNode, CallNode]


def ranks_with(
    call: CallNode, producers: Mapping[CallNode, VariableNode], consumers: Collection[Edge]
) -> dict[CallNode, int]:
    """The ranks to set before the new `call` is linked with its `producers` and `consumers`.

    They are the call's own rank, and new ranks of the calls that must rank above it. Changes nothing. Raises
    `CycleError`.

    As in other incremental topological orders (Pearce and Kelly, 2006), only calls in the wrong order are visited. No
    call is in the wrong order if the new call has no producers, no consumers, or a free rank between them.
    """
    if not producers:
        return {call: min([consumer.rank for _, consumer in consumers], default=1) - 1}
    floor = max([producer.rank for producer in producers])
    if not consumers or floor + 1 < min([consumer.rank for _, consumer in consumers]):
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
