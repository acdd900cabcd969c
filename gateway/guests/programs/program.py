"""A program that enters a session as a whole: values, calls and getters.

Like a transaction: `_Check` tries the whole program without a change to the session, then `entry` adds the parts, and
none of its calls runs before all are there. Reading and entering yield to the event loop between pieces
(`intake/turns.py`); `Entrance` keeps other requests out of the session until the program is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import msgspec

from plait.backends.errors import CallerError, FailedDependencyError, PlaitError
from plait.backends.protocol.openai import decode_body
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.guests.programs.asked_step import AskedStep
from plait.gateway.guests.programs.asked_submission import read_submission
from plait.gateway.guests.programs.chained_call import CallRunner, ChainedCall
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import HeldCall, utf8_bytes
from plait.gateway.guests.programs.core.session import Getter, Session, is_set, repeated
from plait.gateway.guests.programs.core.session_errors import inputs_missing, refused
from plait.gateway.guests.programs.core.sessions import Sessions
from plait.gateway.guests.programs.native_step import DeclaredStep, NativeSteps, new_step, open_step
from plait.gateway.guests.programs.submission import CALL_BODY
from plait.gateway.intake.turns import Pieces
from plait.gateway.timer import loop_time_s
from plait.policy.programs.request_graph import CLIENT, RequestGraph, take_apart
from plait.policy.programs.request_graph_state import (
    DoubleProducerError,
    GraphError,
    VariableState,
    duplicate_call,
)
from plait.policy.types import Objective


class AskedProgram(NamedTuple):
    """A client's program, parsed."""

    request_id: str
    tenant: str
    session_id: str

    values: Mapping[str, str]
    """By variable."""

    calls: Sequence[AskedStep]
    natives: Sequence[DeclaredStep]

    getters: Sequence[Getter]
    """The client's waits for variables."""

    external: frozenset[str]
    """Variables that other requests produce, so that a missing producer is no error."""

    ttl_s: float | None
    """Replaces the session's time to live; None: no change."""

    durable: bool = True
    """Whether a new session outlives the gateway."""

    objective: Objective | None = None
    """Of all that the session produces; None: no change."""


async def read_calls(
    runner: CallRunner, calls: Sequence[msgspec.Raw], incoming: Incoming, session_id: str | None
) -> list[AskedStep]:
    """Parse the calls of a program, in slices. Raises `CallerError` that names the call's place in the program."""
    read = []
    for index, call in enumerate(calls):
        await runner.turns.go_on(incoming.tenant)
        raw, place = bytes(call), f"calls[{index}]"
        with placed(place):
            body = decode_body(raw, CALL_BODY)
        with placed(place, outputs=[one.variable for one in body.placeholders if one.in_out]):
            sent = msgspec.structs.replace(incoming, body=raw, request_id=f"{incoming.request_id}:{index}")
            read.append(await read_submission(runner.reader, sent, body, session_id))
    return read


async def enter(runner: CallRunner, asked: AskedProgram) -> tuple[Session, list[str]]:
    """Open the program's session and enter the program. Returns the session and the ids of the program's calls.

    Raises what `entry` raises. Then nothing has entered, and a session that was new is removed again.
    """
    return await runner.entrance.run(asked.tenant, asked.session_id, _entry(runner, asked, loop_time_s()))


def _entry(runner: CallRunner, asked: AskedProgram, now_s: float) -> Pieces[tuple[Session, list[str]]]:
    executor, calls, is_whole = runner.executor, dict[str, HeldCall](), False
    known = executor.sessions.label(asked.tenant, asked.session_id, now_s)
    session = executor.sessions.open(asked.tenant, asked.session_id, now_s, asked.ttl_s, durable=asked.durable)
    try:
        for index, call in enumerate(asked.calls):
            calls[f"calls[{index}]"] = ChainedCall(runner, session, call).call
            yield
        for index, native in enumerate(asked.natives):
            step_id = f"{asked.request_id}:native-{index}"
            calls[f"natives[{index}]"] = new_step(executor, session, native, step_id)
            yield
        program = Program(asked.values, calls, asked.getters, asked.external)
        entered = yield from entry(executor, session, program, now_s)
        is_whole = True
        executor.prefer(session, asked.objective, now_s)
    finally:
        if not is_whole:
            for getter in asked.getters:
                executor.variables.release(session, getter, loop_time_s())
            if known is None:
                executor.endings.end(session, "has ended because its program was refused", now_s)
    return session, [call.call_id for call in entered]


class Program(NamedTuple):
    """Values by variable, calls and native steps by their places (`calls[0]`, `natives[0]`), and getters.

    `external` are variables that other requests produce.
    """

    values: Mapping[str, str]
    calls: Mapping[str, HeldCall]
    getters: Sequence[Getter] = ()
    external: frozenset[str] = frozenset()


def entry(executor: Executor, session: Session, program: Program, now_s: float) -> Pieces[list[HeldCall]]:
    """Enter a whole program, and return its calls. None of its calls runs before all of it has entered.

    A client may repeat a program: values that are set already are skipped, and a repeated call adds a client to the
    first one. A call whose input has failed fails at once, and so do getters of its outputs. Between two pieces,
    running calls of the session may make progress, but `Entrance` keeps other requests out.

    If this raises, nothing has entered: `ConflictError` for a second producer, a cycle, or the value of a native step
    whose inputs have no values, `CallerError` for an unknown variable, `LimitError` or `ValueTooLargeError` beyond the
    tenant's limits. The message and `param` name the place in the program.
    """
    session.begin_entry(now_s)
    try:
        check = _Check(session, executor.sessions, program)
        yield from check.all()
        session.give_room(has_room=True)
        session.forget_failed(check.failed())
        for call in check.known:
            call.add_client()
        with session.record.whole(), executor.entering(session, now_s):
            for variable in check.order_of_values():
                NativeSteps(executor).set_value(session, variable, check.values[variable], now_s)
                yield from _piece(session)
            for call in check.calls.values():
                with suppress(FailedDependencyError):
                    executor.add(session, call, now_s)
                yield from _piece(session)
            for getter in program.getters:
                executor.variables.get(session, getter, now_s)
                yield from _piece(session)
    finally:
        session.end_entry(now_s)
    return [*check.known, *check.calls.values()]


def _piece(session: Session) -> Pieces[None]:
    yield
    if session.ended is not None:
        raise session.ended


@dataclass(slots=True)
class _Check:
    """Checks a whole program against a session, and finds the parts that are new (a client may repeat a program).

    Changes nothing in the session.
    """

    session: Session
    sessions: Sessions
    program: Program

    values: dict[str, str] = field(default_factory=dict)
    """The new values, by variable."""

    calls: dict[str, HeldCall] = field(default_factory=dict)
    """The new calls, by place."""

    known: list[HeldCall] = field(default_factory=list)
    """The session's calls that calls of the program repeat."""

    produced: dict[str, None] = field(default_factory=dict)
    """The variables that new values and calls produce."""

    taken: dict[str, tuple[str, HeldCall, str | None]] = field(default_factory=dict)
    """By input of new calls, for error messages: the first place that takes the input, its call and its field."""

    def __post_init__(self) -> None:
        session = self.session
        self.values = {name: value for name, value in self.program.values.items() if not is_set(session, name, value)}
        self.produced |= dict.fromkeys(self.values)
        for place, call in self.program.calls.items():
            first = repeated(session, call)
            if first is not None:
                self.known.append(first)
            else:
                self.calls[place] = call
                self.produced |= dict.fromkeys(call.variables)

    def all(self) -> Pieces[None]:
        """Raise what `entry` raises."""
        graph = RequestGraph()
        try:
            yield from self._check_graph(graph)
        finally:
            take_apart(graph)
        self._check_names()
        for name, value in self.values.items():
            with placed(f"values.{name}"):
                _raise(self.sessions.check_size(self.session, utf8_bytes(value), 0))
        yield
        _raise(self._room())

    def failed(self) -> list[str]:
        """The program's variables that have failed in the session before."""
        return [name for name in self.produced if self.session.state_of(name) is VariableState.FAILED]

    def order_of_values(self) -> list[str]:
        """The variables with new values. The output of a native step comes after its inputs."""

        def rank(name: str) -> float:
            step = open_step(self.session, name)
            return -inf if step is None else self.session.graph.call(step.call_id).rank

        return sorted(self.values, key=rank)

    def _check_graph(self, graph: RequestGraph) -> Pieces[None]:
        """Try the program on a scratch `graph`, with the session's calls downstream of it, to find cycles."""
        for call in self._behind():
            yield
            graph.add(call.call_id, call.inputs, call.variables[call.produced :])
        for name in self.values:
            with placed(f"values.{name}"):
                step = open_step(self.session, name)
                if step is None:
                    self._check_producers([name], CLIENT)
                    graph.set_value(name)
                else:
                    self._check_inputs(name, step)
        for place, call in self.calls.items():
            yield
            outputs, where = call.variables, None if call.is_native else "placeholders"
            with placed(place, where, outputs):
                self._check_producers(outputs, call.call_id)
                if call.call_id in self.session.graph.calls:
                    raise duplicate_call(call.call_id)
                graph.add(call.call_id, call.inputs, outputs)
            if call.when is not None:
                self.taken.setdefault(call.when.variable, (place, call, "when"))
            for name in call.inputs:
                self.taken.setdefault(name, (place, call, where))

    def _behind(self) -> Iterable[HeldCall]:
        """The session's calls downstream of the program's variables. Any cycle consists of these and new calls."""
        graph, session = self.session.graph, self.session
        nodes = [node for name in self.produced if (node := graph.variables.get(name)) is not None]
        found = {call.call_id: call for node in nodes for call in node.consumers}
        todo = list(found.values())
        while todo:
            for _, call in todo.pop().edges():
                if call.call_id not in found:
                    found[call.call_id] = call
                    todo.append(call)
        return [call for call_id, call in session.calls.items() if call_id in found] if found else ()

    def _check_producers(self, outputs: Iterable[str], where: str) -> None:
        """Raise `DoubleProducerError` for a variable that has a producer in the session and has not failed."""
        graph = self.session.graph
        for name in outputs:
            node = graph.variables.get(name)
            if node is not None and node.producer is not None and node.state is not VariableState.FAILED:
                raise DoubleProducerError(name, node.producer, where)

    def _check_inputs(self, name: str, step: HeldCall) -> None:
        """Raise `ConflictError` unless each input of a native step has a value, or gets one by this program."""
        missing = [given for given in step.inputs if given not in self.session.values and given not in self.values]
        if missing:
            raise inputs_missing(name, missing)

    def _check_names(self) -> None:
        """Raise for an input or a getter of an unknown variable."""
        known = self.produced.keys() | self.program.external
        for name, (place, call, where) in self.taken.items():
            if name not in known and name not in self.session.graph.variables:
                with placed(place, where, call.variables):
                    raise _unknown(name)
        for getter in self.program.getters:
            name = getter.variable
            if name not in known and name not in self.session.graph.variables:
                with placed(f"gets.{name}"):
                    raise _unknown(name)

    def _room(self) -> PlaitError | None:
        """Make room for the whole program; the error if there is not enough."""
        calls, has_value = self.calls.values(), {*self.values, *self.session.values}.issuperset
        return self.sessions.make_room(
            self.session,
            variables=len((self.produced.keys() | self.taken.keys()) - self.session.graph.variables.keys()),
            waiting_calls=len([call for call in calls if not has_value(call.inputs)]),
            held_bytes=sum(map(utf8_bytes, self.values.values())) + sum([call.held_bytes for call in calls]),
        )


@contextmanager
def placed(place: str, where: str | None = None, outputs: Iterable[str] = ()) -> Iterator[None]:
    """Put the place in the program in front of an error's message, as in `calls[2] (code)` for the output `code`.

    `param` becomes the field `where` in that place, or else the field that the error names.
    """
    try:
        yield
    except GraphError as problem:
        raise _put(refused(problem), place, where, outputs) from problem
    except PlaitError as error:
        _put(error, place, where or error.param, outputs)
        raise


def _put(error: PlaitError, place: str, where: str | None, outputs: Iterable[str]) -> PlaitError:
    names = ", ".join(outputs)
    error.param = place if where is None else f"{place}.{where}"
    error.message = f"{place} ({names}): {error.message}" if names else f"{place}: {error.message}"
    error.args = (error.message,)
    return error


def _unknown(name: str) -> CallerError:
    return CallerError(
        f"Nobody knows the variable '{name}': it has no value and is no output of a call, neither in the program nor "
        "in its session.",
        code="unknown_variable",
    )


def _raise(problem: PlaitError | None) -> None:
    if problem is not None:
        raise problem
