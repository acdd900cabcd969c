"""The states and events of a session's calls and semantic variables: two transition tables, and the errors.

A call leaves the graph when it ends. So the states finished, failed and cancelled appear only in the effects of a
call's last event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeVar


class CallState(StrEnum):
    """The states of a call (Parrot, section 5.1)."""

    WAITING = "waiting"  # at least one input has no value
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class CallEvent(StrEnum):
    """The events of a call."""

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
    """The events of a variable."""

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

State = TypeVar("State", CallState, VariableState)
Event = TypeVar("Event", CallEvent, VariableEvent)


def next_state(table: Mapping[tuple[State, Event], State], state: State, event: Event, kind: str, name: str) -> State:
    """The state after `event`. Raises `GraphTransitionError` with `kind` and `name` if there is no such transition."""
    after = table.get((state, event))
    if after is None:
        raise GraphTransitionError(f"{kind} {name!r} is {state}: event {str(event)!r} is not allowed in this state")
    return after


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
    """Why a call failed: `what` happened in which call (`where` is its id), and the cause of that (`because_of`).

    A client that gets a variable learns from it which earlier call failed, and why (Parrot, section 7). `what` is a
    text, or a value with a `str`. At the root it is the `what` given to `fail`; elsewhere it is `InputFailed`.
    Iterating gives the chain, this cause first and the root last. `length` is the chain's length. `furthest` are the
    chain's last causes without this one, at most `FURTHEST_CAUSES`, the root last. Chains share their tails and may be
    as long as the graph is deep, so no method recurses.
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
        """The last cause of the chain: the first failure."""
        return self.furthest[-1] if self.furthest else self


class GraphError(Exception):
    """The graph refuses an event and stays as it was."""


class GraphTransitionError(GraphError):
    """The event cannot happen in the state of the call or variable."""


class UnknownCallError(GraphError):
    """No call in the graph has this id: it was never added, or it has ended."""

    def __init__(self, call_id: str) -> None:
        super().__init__(f"no call {call_id!r} is in the graph: it was never added, or it has ended")
        self.call_id = call_id


class UnknownVariableError(GraphError):
    """No variable in the graph has this name: no call has named it, or it was forgotten."""

    def __init__(self, variable: str) -> None:
        super().__init__(f"no variable {variable!r} is in the graph: no call has named it, or it was forgotten")
        self.variable = variable


class DuplicateCallError(GraphError):
    """A call in the graph has this id already, and has not ended."""

    def __init__(self, call_id: str) -> None:
        super().__init__(f"call {call_id!r} is in the graph already: use another id, or wait until that call ends")
        self.call_id = call_id


class VariableInUseError(GraphError):
    """The variable cannot be forgotten, because calls that have not ended name it."""

    def __init__(self, variable: str, users: tuple[str, ...]) -> None:
        names = ", ".join(map(repr, users[:3]))
        super().__init__(f"variable {variable!r} cannot be forgotten before the calls that name it end: {names}")
        self.variable = variable
        self.users = users


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
