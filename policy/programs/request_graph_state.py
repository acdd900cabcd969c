"""The states and events of a session's calls and semantic variables: two transition tables, and the errors.

A call that has ended leaves the graph at once. So its last three states appear only in the effects of its last event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeVar


class CallState(StrEnum):
    """Where a call is (Parrot, section 5.1)."""

    WAITING = "waiting"  # for at least one input
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class CallEvent(StrEnum):
    """What happens to a call."""

    UNBLOCK = "unblock"  # the last of its inputs has a value
    START = "start"
    PRODUCE = "produce"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


class VariableState(StrEnum):
    """Where a semantic variable is (Parrot, section 4.1)."""

    EMPTY = "empty"  # calls wait for it, and it has no producer yet
    PENDING = "pending"  # a call that has not ended will produce it
    SET = "set"
    FAILED = "failed"


class VariableEvent(StrEnum):
    """What happens to a variable."""

    PROMISE = "promise"  # a call is added that produces it
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

State = TypeVar("State", CallState, VariableState)
Event = TypeVar("Event", CallEvent, VariableEvent)


def next_state(table: Mapping[tuple[State, Event], State], state: State, event: Event, subject: str) -> State:
    """The state after `event`; raises `GraphTransitionError` naming `subject` where the table has none."""
    after = table.get((state, event))
    if after is None:
        raise GraphTransitionError(f"{subject} is {state}: it cannot {event}")
    return after


FURTHEST_CAUSES: Final = 5
"""This many causes at the far end of a chain are at hand without walking all of it."""


@dataclass(frozen=True, slots=True)
class InputFailed:
    """A call failed because its input `variable` has failed."""

    variable: str

    def __str__(self) -> str:
        return f"its input {self.variable} failed"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cause:
    """Why a call failed: `what` happened, `where` (the id of a call), and `because_of` which other cause.

    A client that gets a variable whose intermediate steps have failed learns why (Parrot, section 7). `what` is a text,
    or a value that has one: `InputFailed`, or at the root the `what` given to `fail`. Iterating gives the chain, this
    cause first and the root last. `length` is the chain's length. `furthest` are its last causes behind this one, at
    most `FURTHEST_CAUSES`. Chains share their tails and may be as long as the graph is deep, so nothing here recurses.
    """

    what: object
    where: str
    because_of: Cause | None = None
    length: int = field(init=False, default=1)
    furthest: tuple[Cause, ...] = field(init=False, default=())

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
        """The last cause of the chain, with which it began."""
        return self.furthest[-1] if self.furthest else self


class GraphError(Exception):
    """An event that the graph refuses; the graph is as it was before."""


class GraphTransitionError(GraphError):
    """The call or the variable is in a state in which this event cannot happen."""


class UnknownCallError(GraphError):
    """No call of this id is in the graph: it was never added, or it has ended."""

    def __init__(self, call_id: str) -> None:
        super().__init__(f"no call {call_id!r} is in the graph: it was never added, or it has ended")
        self.call_id = call_id


class UnknownVariableError(GraphError):
    """No variable of this name is in the graph: nobody has named it, or it was forgotten."""

    def __init__(self, variable: str) -> None:
        super().__init__(f"no variable {variable!r} is in the graph")
        self.variable = variable


class DuplicateCallError(GraphError):
    """A call of this id is in the graph and has not ended."""

    def __init__(self, call_id: str) -> None:
        super().__init__(f"a call {call_id!r} is in the graph already")
        self.call_id = call_id


class VariableInUseError(GraphError):
    """Calls that have not ended name the variable: it cannot be forgotten."""

    def __init__(self, variable: str, users: tuple[str, ...]) -> None:
        super().__init__(f"variable {variable!r} is in use by {', '.join(map(repr, users[:3]))}")
        self.variable = variable
        self.users = users


class DoubleProducerError(GraphError):
    """A variable has one producer, a call or the client: `first` is the producer, `second` was refused."""

    def __init__(self, variable: str, first: str, second: str) -> None:
        super().__init__(f"variable {variable!r} is produced by {first!r} already, {second!r} cannot produce it too")
        self.variable = variable
        self.first = first
        self.second = second


class CycleError(GraphError):
    """A call would wait for itself. `path` is call, variable, call, ...; it begins and ends with the same call."""

    def __init__(self, path: tuple[str, ...]) -> None:
        super().__init__(f"a call cannot wait for its own output: {' -> '.join(path)}")
        self.path = path
