"""A program's entry into its session: in slices of the event loop, and as a whole for everybody else."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeVar

from plait.backends.errors import FailedDependencyError, SessionEndedError
from plait.gateway.programs.executor import Executor
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.native_step import NativeSteps
from plait.gateway.programs.program import Program
from plait.gateway.programs.session import Session
from plait.gateway.programs.slices import Pieces, Slices

T = TypeVar("T")


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
        session.has_room = True
        session.forget_failed((), fresh.failed(session))
        for call in known:
            call.clients += 1
        with executor.entering(session, now_s):
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
        session.is_entered = session.has_room = False
        if not session.ended:
            session.touch(now_s)
    return [*known, *fresh.calls.values()]


def _piece(session: Session) -> Pieces[None]:
    yield
    if session.ended:
        raise SessionEndedError(f"The session '{session.session_id}' has ended while its program entered it.")


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
