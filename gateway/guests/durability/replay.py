"""Rebuilds a session from its log: sends the logged events to the executor, in order.

A call that had not ended is made from its logged request, gets the outputs that it has produced, and starts again. A
call that had ended becomes a ghost (`_ghost`), which only remembers its fingerprint and outputs, so that a repeated
request is recognized. A call that failed with an input or was skipped is made from its request, too, and fails or is
skipped again by the executor's own rules, because the log does not have such ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from plait.backends.errors import FailedDependencyError, PlaitError
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.guests.durability.ended_calls import ended_calls
from plait.gateway.guests.programs.asked_submission import submitted_again
from plait.gateway.guests.programs.chained_call import CallRunner, ChainedCall
from plait.gateway.guests.programs.chained_calls import answered_again, answered_before
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import HeldCall, Output, Promise, ReadyCall
from plait.gateway.guests.programs.core.record import (
    CallEnded,
    Closed,
    Kept,
    Opened,
    Preferred,
    SessionEvent,
    Started,
    Submitted,
    ValueSet,
    VariableFailed,
)
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.core.session_errors import FailureCause
from plait.gateway.guests.programs.native_step import native_again
from plait.gateway.guests.responses.background_call import BackgroundCall
from plait.policy.programs.request_graph_state import CallState

Again = Callable[[CallRunner, Session, Incoming], HeldCall]
"""Makes the call of a logged request, or raises `CallerError` if the request is not valid any more."""

AGAIN: Final[dict[str, Again]] = {"submission": submitted_again, "answered": answered_again, "native": native_again}
"""By the kind of a logged request; what guests log is theirs."""

log = structlog.get_logger(__name__)


class EndedCall:
    """The owner of a ghost: a call that had ended before the restart. It does nothing, as the end is in the log."""

    def on_ready(self, ready: ReadyCall) -> None: ...

    def on_refined(self, promise: Promise) -> None: ...

    def on_broken(self, error: PlaitError) -> None: ...


@dataclass(slots=True)
class Replay:
    runner: CallRunner
    again: Mapping[str, Again]
    session: Session

    start: asyncio.Event
    """Interrupted calls start after this is set."""

    models: set[str]
    """Collects the models of interrupted calls."""

    now_s: float

    _submitted: dict[str, Submitted] = field(default_factory=dict)
    """By call id."""

    _unreadable: list[tuple[HeldCall, str]] = field(default_factory=list)
    """Calls whose requests are not valid any more, and why."""

    def run(self, events: Sequence[SessionEvent], when_whole: Callable[[Session], None]) -> None:
        """Replay all events. `when_whole` is called after the last one, before any call is started."""
        session, ended = self.session, ended_calls(events)
        session.give_room(has_room=True)  # it was within limits, which the operator may have lowered since
        with self.runner.executor.entering(session, self.now_s):
            for place, event in enumerate(events):
                try:
                    self._apply(event, is_over=place in ended)
                except PlaitError as error:
                    log.warning(
                        "an event of a session is left out", session=session.session_id, problem=error.shown_code
                    )
            session.give_room(has_room=False)
            when_whole(session)
            for call, problem in [*self._unreadable, *self._exhausted()]:
                if isinstance(call.owner, BackgroundCall):
                    call.owner.give_up(problem)
                else:
                    self.runner.executor.fail(call, FailureCause(message=problem), self.now_s)

    @property
    def _executor(self) -> Executor:
        return self.runner.executor

    def _apply(self, event: SessionEvent, *, is_over: bool) -> None:
        session, executor, now_s = self.session, self._executor, self.now_s
        match event:
            case Opened() | Kept():
                session.live_for(event.ttl_s)
            case Preferred():
                executor.prefer(session, event.objective, now_s)
            case Closed():
                executor.endings.close(session, now_s)
            case Submitted():
                self._submit(event, is_over=is_over)
            case Started() if event.call_id in session.calls:
                executor.attempt(session.calls[event.call_id], now_s)
            case ValueSet():
                self._set(event)
            case VariableFailed():
                executor.variables.set_failed(session, event.variable, event.what, now_s, event.where)
            case CallEnded():
                self._end(event)

    def _end(self, event: CallEnded) -> None:
        call = self.session.calls.get(event.call_id)
        if call is None:
            return  # it has failed with an input
        if event.how == "failed":
            self._executor.fail(call, event.what, self.now_s)
        else:
            self._executor.cancel(call, self.now_s, event.what)

    def _submit(self, event: Submitted, *, is_over: bool) -> None:
        call = self._ghost(event) if is_over else self._made(event)
        call.mark_recorded()
        self._submitted[event.call_id] = event
        try:
            self._executor.add(self.session, call, self.now_s)
        except FailedDependencyError:
            return  # an input had failed before: the call failed at once then, too

    def _made(self, event: Submitted) -> HeldCall:
        request, runner, session = event.request, self.runner, self.session
        incoming = Incoming(request.path, request.headers, request.body, event.call_id, self.now_s, session.tenant.name)
        try:
            call = self.again[request.kind](runner, session, incoming)
        except PlaitError as error:
            call = self._ghost(event)
            self._unreadable.append((call, f"it cannot be read again after a restart: {error.message}"))
        if isinstance(call.owner, ChainedCall):
            call.owner.start_after(self.start)
            self.models.add(call.model)
        return call

    def _ghost(self, event: Submitted) -> HeldCall:
        """A call without its request, whose end is in the log."""
        outputs = tuple(map(Output, event.outputs))
        native_s = 0.0 if event.request.kind == "native" else None
        return HeldCall(
            event.call_id, event.inputs, outputs, EndedCall(), native_s=native_s, fingerprint=event.fingerprint
        )

    def _set(self, event: ValueSet) -> None:
        session, executor = self.session, self._executor
        if event.call_id is None:
            executor.variables.set_value(session, event.variable, event.value, self.now_s)
            return
        call = session.calls.get(event.call_id)
        if call is None:
            return
        if session.graph.call_state(call.call_id) is CallState.READY:
            executor.start(call, self.now_s)
        submitted = self._submitted[call.call_id]
        if submitted.request.kind == "answered":
            call.owner = answered_before(self.runner, session, call, submitted.request, event)
        elif isinstance(call.owner, ChainedCall):
            call.owner.go_on_after(event.value if event.text is None else event.text, event.value)
        executor.produce(call, event.value, self.now_s, was_cut=event.was_cut)

    def _exhausted(self) -> Iterator[tuple[HeldCall, str]]:
        """The calls without an attempt left: they may be what crashes the gateway."""
        most = self._executor.sessions.limits.max_attempts
        for call in self.session.calls.values():
            if call.attempts >= most:
                yield call, f"it was started {call.attempts} times, and a gateway ended before it did each time"
