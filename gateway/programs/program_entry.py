"""A program's entry into its session, as one event."""

from __future__ import annotations

from contextlib import suppress

from plait.backends.errors import FailedDependencyError
from plait.gateway.programs.executor import Executor
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.native_step import NativeSteps
from plait.gateway.programs.program import Program
from plait.gateway.programs.session import Session


def enter(executor: Executor, session: Session, program: Program, now_s: float) -> list[HeldCall]:
    """Enter a whole program, and return its calls. No call of the session runs before all of the program is there.

    What the program repeats is left out: instead of a repeated call it has the first one, as one more client of it.
    Raises what `Program.check` raises; then nothing of it has entered. A call whose input has failed before fails at
    once, and getters of its outputs are told so.
    """
    known, fresh, natives = program.known(session), program.fresh(session), NativeSteps(executor)
    fresh.check(session, executor.sessions)
    session.forget_failed((), fresh.failed(session))
    for call in known:
        call.clients += 1
    with executor.entering(session, now_s):
        for variable in fresh.order_of_values(session):
            natives.set_value(session, variable, fresh.values[variable], now_s)
        for call in fresh.calls.values():
            with suppress(FailedDependencyError):
                executor.add(session, call, now_s)
        for getter in fresh.getters:
            executor.variables.get(session, getter, now_s)
    return [*known, *fresh.calls.values()]
