"""Native steps: variables that a client computes from others, between two calls (Parrot's native functions).

A native step is a call of the graph that no engine runs: its client gets the inputs, then sets the output's value or
fails it. Through the step, deduced objectives reach the calls before it, and failures the calls after it.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

from plait.backends.errors import FailedDependencyError, PlaitError
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.guests.programs.chained_call import CallRunner
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import HeldCall, KeptRequest, Output, Promise, ReadyCall, utf8_bytes
from plait.gateway.guests.programs.core.session import Session, has_failed, is_set, repeated
from plait.gateway.guests.programs.core.session_errors import FailureCause, inputs_missing, session_closed
from plait.gateway.guests.programs.submission import VariableName

StepInputs = Annotated[list[VariableName], Meta(min_length=1)]
StepSeconds = Annotated[float, Meta(ge=0, le=86_400)]


class DeclaredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client's declaration that it computes `output` from `inputs`, in about `seconds`."""

    output: VariableName
    inputs: StepInputs
    seconds: StepSeconds = 0.0


class NativeStep:
    """The owner of a native step, which only waits for its client."""

    def __init__(self, executor: Executor, session: Session) -> None:
        self._executor = executor
        self._session = session
        self.call: HeldCall

    def on_ready(self, ready: ReadyCall) -> None:
        """Start the client's time limit."""
        self._executor.endings.wait_for_client(self._session, self.call, ready.ready_s)

    def on_refined(self, promise: Promise) -> None:
        """Does nothing: no engine runs the step."""

    def on_broken(self, error: PlaitError) -> None:
        """Does nothing: clients wait for the output, which has failed."""


class NativeSteps:
    """The values that clients set, with or without a declared step."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def declare(self, session: Session, declared: DeclaredStep, call_id: str, now_s: float) -> None:
        """Add a step. A repetition has no effect, unless the step has failed.

        If an input has failed, the output fails at once. Raises what `Executor.add` raises for a call.
        """
        step = new_step(self._executor, session, declared, call_id)
        if repeated(session, step) is None:
            with suppress(FailedDependencyError):
                self._executor.add(session, step, now_s)

    def set_value(self, session: Session, variable: str, value: str, now_s: float) -> None:
        """Set a variable for a client. The same value again has no effect.

        Raises what `Variables.set_value` raises, and `ConflictError` if the inputs of a native step have no values yet.
        """
        if is_set(session, variable, value):
            return
        executor, step = self._executor, open_step(session, variable)
        if step is None:
            executor.variables.set_value(session, variable, value, now_s)
            return
        if session.closed:
            raise session_closed(session.session_id)
        if step.ready_s is None:
            missing = [name for name in step.inputs if name not in session.values]
            raise inputs_missing(variable, missing, param="value")
        size_bytes = utf8_bytes(value)
        problem = executor.sessions.check_size(session, size_bytes, size_bytes)
        if problem is not None:
            raise problem
        executor.start(step, now_s)
        executor.produce(step, value, now_s)

    def set_failed(self, session: Session, variable: str, what: FailureCause, now_s: float) -> None:
        """Fail a variable that a client could not compute. A repetition has no effect.

        Raises what `Variables.set_failed` raises.
        """
        if has_failed(session, variable, what):
            return
        step = open_step(session, variable)
        if step is None:
            self._executor.variables.set_failed(session, variable, what, now_s)
        else:
            self._executor.fail(step, what, now_s)


def new_step(executor: Executor, session: Session, declared: DeclaredStep, call_id: str) -> HeldCall:
    """A native step. The caller adds it to the session."""
    inputs = tuple(dict.fromkeys(declared.inputs))
    owner = NativeStep(executor, session)
    owner.call = HeldCall(
        session.unused_id(call_id),
        inputs,
        (Output(declared.output),),
        owner,
        native_s=declared.seconds,
        held_bytes=sum(map(len, inputs)),
        fingerprint=sha256(repr(("native", declared.output, inputs, declared.seconds)).encode()).digest(),
        request=lambda: KeptRequest("native", "", (), msgspec.json.encode(declared)),
    )
    return owner.call


def native_again(runner: CallRunner, session: Session, incoming: Incoming) -> HeldCall:
    """A native step from the log. The caller adds it to the session."""
    declared = msgspec.json.decode(incoming.body, type=DeclaredStep)
    return new_step(runner.executor, session, declared, incoming.request_id)


def open_step(session: Session, variable: str) -> HeldCall | None:
    """The native step that will produce the variable; None if there is none or it has ended."""
    call = session.outputs.get(variable)
    return call if call is not None and call.is_native and session.calls.get(call.call_id) is call else None
