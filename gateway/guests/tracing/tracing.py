"""Follows the calls that are traced, from their beginning to their end, and their programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import time
from typing import Final
from zlib import crc32

from plait.backends.http.body import Body
from plait.gateway.asgi import Headers
from plait.gateway.calls.call import NO_SLOT
from plait.gateway.calls.delivery import Companion, Delivery
from plait.gateway.config.sections import TracingConfig
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.core.sessions import Sessions
from plait.gateway.guests.receipts.receipts import Receipts
from plait.gateway.guests.tracing.context import Parent, digest, parent_of, with_parent
from plait.gateway.guests.tracing.spans import EndedCall, EndedProgram, attempt_id
from plait.gateway.timer import loop_time_s

QUIET_S: Final = 30.0
"""A program is over when its session has ended, or has had no call for this long."""


@dataclass(slots=True)
class OpenProgram:
    """A program of which calls are traced. Times are in seconds from 1970."""

    trace_id: int
    span_id: int
    parent_id: int
    began_s: float
    ended_s: float


class Tracing:
    """Decides which calls are traced. `add` gets the records of those that have ended.

    `sessions` are those of programs; None: there are none. `label` turns a tenant into the name that operators see,
    `engine` finds an engine's software, host and port.
    """

    def __init__(
        self,
        settings: TracingConfig,
        receipts: Receipts,
        sessions: Sessions | None,
        add: Callable[[EndedCall | EndedProgram], None],
        *,
        label: Callable[[str], str],
        engine: Callable[[str], tuple[str, str, int]],
    ) -> None:
        self._drawn = settings.sample * 2**32
        self._most_calls_per_s = settings.max_calls_per_s
        self._receipts = receipts
        self._sessions = sessions
        self._add = add
        self._label = label
        self._engine = engine
        self._second, self._begun = 0, 0
        self._programs: dict[tuple[str, str], OpenProgram] = {}

    def begins(self, delivery: Delivery) -> TracedCall | None:
        """A call whose parent is traced, or of a share of those without one, within the most a second.

        One that is not traced costs no further call of a function.
        """
        asked, given = delivery.asked, None
        for header, value in asked.headers:
            if header == b"traceparent":
                given = value
        name = asked.call.call_id if asked.slot is NO_SLOT else f"{asked.tenant} {asked.session}"
        if given is None:
            return None if crc32(name.encode()) >= self._drawn else self._traced(delivery, name, None)
        return None if given.endswith(b"-00") else self._traced(delivery, name, parent_of(given))

    def _traced(self, delivery: Delivery, name: str, parent: Parent | None) -> TracedCall | None:
        if (parent is not None and not parent.is_sampled) or not self._has_room():
            return None
        asked, parent_id = delivery.asked, 0 if parent is None else parent.span_id
        trace_id = digest(name, size=16) if parent is None else parent.trace_id
        if asked.slot is not NO_SLOT and asked.session is not None:
            program = self._program(asked.tenant, asked.session, trace_id, parent_id)
            trace_id, parent_id = program.trace_id, program.span_id
        return TracedCall(self, trace_id, digest(trace_id, asked.call.call_id), parent_id)

    def _has_room(self) -> bool:
        """Whether one more call may be traced in this second."""
        second = int(loop_time_s())
        if second != self._second:
            self._second, self._begun = second, 0
        self._begun += 1
        return self._begun <= self._most_calls_per_s

    def _program(self, tenant: str, session: str, trace_id: int, parent_id: int) -> OpenProgram:
        program = self._programs.get((tenant, session))
        if program is None:
            span_id, now_s = digest(trace_id, tenant, session), time()
            program = OpenProgram(trace_id, span_id, parent_id, now_s, now_s)
            self._programs[tenant, session] = program
        return program

    def ended(self, delivery: Delivery, call: TracedCall) -> None:
        """A traced call has ended."""
        asked, receipt = delivery.asked, self._receipts.of(delivery)
        engines = {choice.engine: self._engine(choice.engine) for choice in receipt.choices}
        program = self._programs.get((asked.tenant, asked.session or ""))
        if program is not None:
            program.began_s, program.ended_s = min(program.began_s, receipt.at), time()
        self._add(
            EndedCall(
                receipt,
                call.trace_id,
                call.span_id,
                call.parent_id,
                self._label(asked.tenant),
                asked.turn_of,
                engines,
                asked.slot.output,
                [digest(call.trace_id, made_by) for made_by in asked.slot.made_by],
            )
        )

    def _session(self, tenant: str, session_id: str) -> Session | None:
        owner = None if self._sessions is None else self._sessions.tenants.get(tenant)
        return None if owner is None else owner.sessions.get(session_id)

    def look(self, *, all_of_them: bool = False) -> None:
        """Tell of the programs that are over."""
        for (tenant, session_id), program in list(self._programs.items()):
            session = self._session(tenant, session_id)
            is_quiet = session is None or (session.is_idle and time() - program.ended_s > QUIET_S)
            if all_of_them or is_quiet:
                del self._programs[tenant, session_id]
                self._add(
                    EndedProgram(
                        session_id,
                        self._label(tenant),
                        program.trace_id,
                        program.span_id,
                        program.parent_id,
                        program.began_s,
                        program.ended_s,
                    )
                )


@dataclass(frozen=True, slots=True)
class TracedCall(Companion):
    """The companion of one call."""

    tracing: Tracing
    trace_id: int
    span_id: int
    parent_id: int

    def sent(self, headers: Headers, body: Body, delivery: Delivery) -> tuple[Headers, Body]:
        """With the header by which the engine goes on with the next attempt's span."""
        number = len(delivery.tried)
        return with_parent(headers, self.trace_id, attempt_id(self.trace_id, delivery.call.call_id, number)), body

    def ended(self, delivery: Delivery) -> None:
        self.tracing.ended(delivery, self)
