"""A program that enters a session as a whole: its values, calls and getters, checked before any of them is there.

It enters in slices of the event loop, and as a whole for everybody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import NamedTuple, TypeVar

from plait.backends.errors import CallerError, FailedDependencyError, PlaitError
from plait.gateway.programs.executor import Executor
from plait.gateway.programs.growing_text import utf8_bytes
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.native_step import NativeSteps, open_step
from plait.gateway.programs.session import Getter, Session, is_set, repeated
from plait.gateway.programs.session_errors import inputs_missing, refused
from plait.gateway.programs.sessions import Sessions
from plait.gateway.programs.slices import Pieces, Slices
from plait.policy.programs.request_graph import CLIENT, RequestGraph
from plait.policy.programs.request_graph_state import DoubleProducerError, GraphError, VariableState

T = TypeVar("T")


class Program(NamedTuple):
    """Values by variable, calls and native steps by their places (`calls[0]`, `natives[0]`), and getters.

    `external` are variables that others produce.
    """

    values: Mapping[str, str]
    calls: Mapping[str, HeldCall]
    getters: Sequence[Getter] = ()
    external: frozenset[str] = frozenset()

    def known(self, session: Session) -> list[HeldCall]:
        """The session's calls that calls of the program repeat."""
        return [first for call in self.calls.values() if (first := repeated(session, call)) is not None]

    def fresh(self, session: Session) -> Program:
        """The program without the values and calls that the session has already: a client may repeat its program."""
        return Program(
            {name: value for name, value in self.values.items() if not is_set(session, name, value)},
            {place: call for place, call in self.calls.items() if repeated(session, call) is None},
            self.getters,
            self.external,
        )

    def failed(self, session: Session) -> list[str]:
        """The variables that it gives values, and that have failed in the session before."""
        return [name for name in self._produced() if session.state_of(name) is VariableState.FAILED]

    def order_of_values(self, session: Session) -> list[str]:
        """The variables that it gives values: those of native steps after the inputs of these steps."""

        def rank(name: str) -> float:
            step = open_step(session, name)
            return -inf if step is None else session.graph.call(step.call_id).rank

        return sorted(self.values, key=rank)

    def check(self, session: Session, sessions: Sessions) -> Pieces[None]:
        """Raise if the session or its tenant's limits do not allow the whole program. Changes nothing in the session.

        Raises `ConflictError` for a second producer, a cycle, or the value of a native step whose inputs have none,
        `CallerError` for a variable that nobody knows, `LimitError` or `ValueTooLargeError` beyond the limits. The
        message and `param` name the place in the program.
        """
        yield from self._check_graph(session)
        yield from self._check_names(session)
        for name, value in self.values.items():
            with placed(f"values.{name}"):
                _raise(sessions.check_size(session, utf8_bytes(value), 0))
        yield
        _raise(self._room(session, sessions))

    def _produced(self) -> Iterator[str]:
        yield from self.values
        yield from (name for call in self.calls.values() for name in output_names(call))

    def _check_graph(self, session: Session) -> Pieces[None]:
        """Try the calls that have not ended, and then the program, on a graph of their own."""
        graph = RequestGraph()
        for call in [*session.calls.values()]:
            yield
            graph.add(call.call_id, call.inputs, output_names(call)[call.produced :])
        for name in self.values:
            with placed(f"values.{name}"):
                step = open_step(session, name)
                if step is None:
                    _check_producers(session, [name], CLIENT)
                    graph.set_value(name)
                else:
                    self._check_inputs(session, name, step)
        for place, call in self.calls.items():
            yield
            outputs = output_names(call)
            with placed(named(place, outputs), _field_of(call)):
                _check_producers(session, outputs, call.call_id)
                graph.add(call.call_id, call.inputs, outputs)

    def _check_inputs(self, session: Session, name: str, step: HeldCall) -> None:
        """Raise `ConflictError` unless the inputs of an earlier native step have values, or get them here."""
        missing = [given for given in step.inputs if given not in session.values and given not in self.values]
        if missing:
            raise inputs_missing(name, missing)

    def _check_names(self, session: Session) -> Pieces[None]:
        known = {*self._produced(), *self.external}
        for place, call in self.calls.items():
            yield
            if call.when is not None:
                with placed(named(place, output_names(call)), "when"):
                    _check_known(session, known, [call.when.variable])
            with placed(named(place, output_names(call)), _field_of(call)):
                _check_known(session, known, call.inputs)
        for getter in self.getters:
            with placed(f"gets.{getter.variable}"):
                _check_known(session, known, [getter.variable])

    def _room(self, session: Session, sessions: Sessions) -> PlaitError | None:
        """Make room for all of it; the error if there is not enough."""
        taken = (name for call in self.calls.values() for name in call.inputs)
        names = {*self._produced(), *taken}
        has_value = {*self.values, *session.values}.issuperset
        sizes = [*map(utf8_bytes, self.values.values()), *(call.held_bytes for call in self.calls.values())]
        return sessions.make_room(
            session,
            variables=sum(name not in session.graph.variables for name in names),
            waiting_calls=sum(not has_value(call.inputs) for call in self.calls.values()),
            held_bytes=sum(sizes),
        )


def output_names(call: HeldCall) -> tuple[str, ...]:
    """The variables that the call produces, in order."""
    return tuple(output.variable for output in call.outputs)


def named(place: str, outputs: Iterable[str]) -> str:
    """A call's place in the program as messages show it: `calls[2] (code)`."""
    names = ", ".join(outputs)
    return f"{place} ({names})" if names else place


@contextmanager
def placed(place: str, field: str | None = None) -> Iterator[None]:
    """An error inside the block names its place in the program.

    Its `param` is `field` in that place, or else the field that it names itself.
    """
    try:
        yield
    except GraphError as problem:
        error = refused(problem)
        _put(error, place, field)
        raise error from problem
    except PlaitError as error:
        _put(error, place, field or error.param)
        raise


def _put(error: PlaitError, place: str, field: str | None) -> None:
    path = place.partition(" ")[0]
    error.param = path if field is None else f"{path}.{field}"
    error.message = f"{place}: {error.message}"
    error.args = (error.message,)


def _field_of(call: HeldCall) -> str | None:
    """The field of a program's call that names its variables; None if there are several."""
    return None if call.is_native else "placeholders"


def _check_producers(session: Session, outputs: Iterable[str], where: str) -> None:
    """Raise `DoubleProducerError` for a variable that has a producer in the session and has not failed."""
    for name in outputs:
        first = session.graph.producer(name)
        if first is not None and session.state_of(name) is not VariableState.FAILED:
            raise DoubleProducerError(name, first, where)


def _check_known(session: Session, known: set[str], names: Iterable[str]) -> None:
    for name in names:
        if name not in known and name not in session.graph.variables:
            raise CallerError(
                f"Nobody knows the variable '{name}': it has no value and is no output of a call, neither in the "
                "program nor in its session.",
                code="unknown_variable",
            )


def _raise(problem: PlaitError | None) -> None:
    if problem is not None:
        raise problem


def entry(executor: Executor, session: Session, program: Program, now_s: float) -> Pieces[list[HeldCall]]:
    """Enter a whole program, and return its calls. No call of the session runs before all of the program is there.

    What the program repeats is left out: instead of a repeated call it has the first one, as one more client of it.
    Raises what `Program.check` raises; then nothing of it has entered. A call whose input has failed before fails at
    once, and getters of its outputs are told so. Between two pieces, calls of the session that run may go on, and
    nobody else may change it: see `Entrance`.
    """
    session.is_entered = True
    session.touch(now_s)  # it is not idle now, so it is not evicted
    try:
        known, fresh, natives = program.known(session), program.fresh(session), NativeSteps(executor)
        yield
        yield from fresh.check(session, executor.sessions)
        session.give_room(has_room=True)
        session.forget_failed((), fresh.failed(session))
        for call in known:
            call.add_client()
        with session.record.whole(), executor.entering(session, now_s):
            for variable in fresh.order_of_values(session):
                natives.set_value(session, variable, fresh.values[variable], now_s)
                yield from _piece(session)
            for call in fresh.calls.values():
                with suppress(FailedDependencyError):
                    executor.add(session, call, now_s)
                yield from _piece(session)
            for getter in fresh.getters:
                executor.variables.get(session, getter, now_s)
                yield from _piece(session)
    finally:
        session.is_entered = False
        session.give_room(has_room=False)
        if not session.ended:
            session.touch(now_s)
    return [*known, *fresh.calls.values()]


def _piece(session: Session) -> Pieces[None]:
    yield
    if session.ended is not None:
        raise session.ended


class Entrance:
    """Where programs enter their sessions: one of a tenant at a time, so that each finds the room it was promised.

    Until a program is whole, other requests for its session wait: `whole`.
    """

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._turns: dict[str, asyncio.Lock] = {}  # by tenant
        self._sessions: dict[str, str] = {}  # the one that each tenant's program enters now

    async def run(self, tenant: str, session_id: str, work: Pieces[T]) -> T:
        """Do the work of entering a session, in the tenant's turn; returns its result. Raises what it raises."""
        async with self._turns.setdefault(tenant, asyncio.Lock()):
            self._sessions[tenant] = session_id
            try:
                return await self._slices.run(tenant, work)
            finally:
                del self._sessions[tenant]

    async def whole(self, tenant: str, session_id: str | None) -> None:
        """Wait while a program enters the session."""
        if self._sessions and session_id is not None and self._sessions.get(tenant) == session_id:
            async with self._turns[tenant]:
                pass
