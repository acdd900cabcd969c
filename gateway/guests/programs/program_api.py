"""`POST /v1/programs`: a whole program in one request. All of it enters its session, or nothing of it.

The answer has the values and failures that the client waits for, as one object or as a stream of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.backends.errors import GatewayStoppingError, ProgramTooLargeError
from plait.backends.protocol.client_bodies import mended
from plait.backends.protocol.openai import decode_body
from plait.gateway.api.auth import KeyRing, key_of
from plait.gateway.api.own_route import OwnRoute
from plait.gateway.asgi import (
    EVENT_STREAM,
    ClientGoneError,
    Headers,
    error_headers,
    event,
    id_of,
    send_whole,
    unless_gone,
)
from plait.gateway.calls.annotations import PROGRAM_WITH_GETS, TAKEN, of_route
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.guests.programs.asked_step import AskedStep
from plait.gateway.guests.programs.awaited_variable import (
    JSON,
    AwaitedVariable,
    Criteria,
    Json,
    given_by,
    mark_of,
    next_change,
    slo_of,
    with_slo,
)
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import with_condition
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.native_step import DeclaredStep
from plait.gateway.guests.programs.program import AskedProgram, enter, read_calls
from plait.gateway.guests.programs.submission import SessionId, TimeToLive, VariableName
from plait.gateway.guests.programs.unstored import unstored_fields, unstored_headers
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.timer import loop_time_s
from plait.policy.programs.needs import Mark

PATH: Final = "/v1/programs"
DELTA: Final = "delta"
"""The kind of an event with the new characters of a variable's text."""


class ProgramBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/programs`. A value that is not a text becomes its JSON text.

    `external` are variables that other requests produce, now or later.
    """

    session: SessionId | None = None
    """None: a new session."""

    ttl_s: TimeToLive | None = None
    """Replaces the session's time to live; None: no change."""

    external: frozenset[VariableName] = frozenset()
    values: dict[VariableName, Any] = {}

    calls: list[msgspec.Raw] = []
    """Each is a `CallBody`, decoded later so that an error names the call's place."""

    natives: list[DeclaredStep] = []
    """Variables that the client computes from others between calls."""

    gets: dict[VariableName, Criteria | None] = {}
    """The variables that the client waits for, each with its criteria."""

    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    """The longest wait for these variables."""

    stream: bool = False
    """Whether the answer is a stream of server-sent events."""

    def texts(self) -> dict[str, str]:
        return {
            name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for name, value in self.values.items()
        }


EXAMPLE: Final[Json] = {
    "values": {"topic": "rain"},
    "calls": [
        {
            "model": "demo",
            "messages": [
                {"role": "user", "content": "Write about {{topic}}."},
                {"role": "assistant", "content": "{{text}}"},
            ],
            "placeholders": [{"name": "topic"}, {"name": "text", "in_out": True, "semantic_var_id": "text"}],
        }
    ],
    "gets": {"text": None},
}

_PROGRAM = msgspec.json.Decoder(ProgramBody)


class ProgramApi:
    """The route for whole programs. The application's exception handlers answer its errors."""

    def __init__(self, chained: ChainedCalls, keys: KeyRing, bodies: OpenBodies, keep_alive_s: float) -> None:
        self._chained = chained
        self._keys = keys
        self._bodies = bodies
        self._keep_alive_s = keep_alive_s
        self.routes = [
            OwnRoute(
                "POST",
                PATH,
                self._run,
                "Run a whole program of calls",
                body=ProgramBody,
                example=EXAMPLE,
                annotations=TAKEN[PROGRAM_WITH_GETS],
                tells=("plait-slo",),
            )
        ]

    async def _run(self, request: Request) -> ASGIApp:
        executor, headers = self._chained.executor, request.scope["headers"]
        tenant = self._keys.check(request.scope)
        with self._bodies.open(request.scope, tenant) as open_body:
            raw = await open_body.read(request.receive, headers)
            body, raw = mended(decode_body, raw, _PROGRAM)
            self._check_size(len(body.calls) + len(body.natives))
            changed = asyncio.Event()
            route = PROGRAM_WITH_GETS if body.gets else PATH
            annotations = of_route(route, headers, ("session", "session", body.session))
            incoming = Incoming(
                PATH, headers, raw, id_of(request.scope), loop_time_s(), tenant, key=key_of(request.scope)
            )
            calls = await read_calls(self._chained.runner, body.calls, incoming, body.session)
            last = _last_gets(body, calls) if annotations.mark is not None else ()
            awaited = [
                AwaitedVariable(name, _mark(body, name, headers if name in last else ()), changed, streamed=body.stream)
                for name in body.gets
            ]
            values, getters = body.texts(), [one.getter for one in awaited]
            asked = AskedProgram(
                incoming.request_id,
                tenant,
                body.session or executor.sessions.new_id(tenant),
                values,
                calls,
                body.natives,
                getters,
                body.external,
                body.ttl_s,
                annotations.durable is not False,
                annotations.session_objective,
            )
            session, call_ids = await enter(self._chained.runner, asked)
        return ProgramResponse(
            executor,
            session,
            call_ids,
            awaited,
            changed,
            timeout_s=body.timeout_s,
            keep_alive_s=self._keep_alive_s if body.stream else None,
        )

    def _check_size(self, calls: int) -> None:
        most = self._chained.executor.sessions.limits.max_program_calls
        if calls > most:
            raise ProgramTooLargeError(
                f"The program has {calls:,} calls and native steps; at most {most:,} fit into one request. Send the "
                "others in a further request with the same session.",
                param="calls",
            )


def _last_gets(body: ProgramBody, calls: Sequence[AskedStep]) -> set[str]:
    """The gets that no other get waits for."""
    inputs: dict[str, Collection[str]] = {step.output: step.inputs for step in body.natives}
    for call in calls:
        needs = with_condition(call.prompts.inputs, call.annotations.when)
        inputs |= {output.variable: needs for output in call.prompts.outputs}
    before, walked = set[str](), [*body.gets]
    while walked:
        new = set(inputs.get(walked.pop(), ())) - before
        before |= new
        walked += new
    return body.gets.keys() - before


def _mark(body: ProgramBody, name: str, headers: Headers) -> Mark | None:
    """The criterion of a get; the annotations of the program are those of its last gets."""
    criteria, session = body.gets[name], ("session", "session", body.session)
    return mark_of(criteria, of_route(PROGRAM_WITH_GETS, headers, session, *given_by(criteria, f"gets.{name}")))


class ProgramEvents:
    """Makes the server-sent events of the variables that a stream waits for."""

    def __init__(self, session: Session, awaited: Sequence[AwaitedVariable]) -> None:
        self._session = session
        self._open = list(awaited)

    @property
    def is_over(self) -> bool:
        """Whether each variable has had its last event: its value or its failure."""
        return not self._open

    def new(self) -> list[Event]:
        """The events that were not returned yet. All new text of a variable is in one delta."""
        found = [one for awaited in self._open for one in self._of(awaited)]
        self._open = [awaited for awaited in self._open if not awaited.is_answered]
        return found

    def _of(self, awaited: AwaitedVariable) -> Iterator[Event]:
        name, text = awaited.name, awaited.new_text()
        if text:
            yield Event(DELTA, {"name": name, "delta": text})
        if awaited.error is not None:
            yield Event("failed", {"name": name, "error": awaited.error.error_object})
        elif awaited.value is not None:
            yield Event("value", {"name": name, "value": awaited.value, "truncated": self._session.was_cut(name)})


class Event(NamedTuple):
    """A server-sent event: its name and its JSON object."""

    kind: str
    data: Json


def unstored_events(events: Sequence[Event]) -> Sequence[Event]:
    """Mark every event except deltas as not stored."""
    return [one if one.kind == DELTA else Event(one.kind, unstored_fields(one.data)) for one in events]


class ProgramResponse(Response):
    """The answer to a program that has entered its session: waits up to `timeout_s` for the `awaited` variables.

    Without `awaited` variables, the answer is 202 at once. `call_ids` are the program's calls. The event `changed` is
    set whenever an awaited variable changes.
    """

    def __init__(
        self,
        executor: Executor,
        session: Session,
        call_ids: Sequence[str],
        awaited: Sequence[AwaitedVariable],
        changed: asyncio.Event,
        *,
        timeout_s: float,
        keep_alive_s: float | None,
    ) -> None:
        super().__init__()
        self._executor = executor
        self._session = session
        self._call_ids = call_ids
        self._awaited = awaited
        self._changed = changed
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s  # None: not streamed

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session
        if not self._awaited:
            headers = await self._stored(JSON)
            await send_whole(send, 202, headers, msgspec.json.encode(self._described()))
            return
        try:
            answer = self._whole if self._keep_alive_s is None else self._stream
            with suppress(ClientGoneError):
                await unless_gone(receive, answer(session, send))
        finally:
            for awaited in self._awaited:
                awaited.release(self._executor, session)
            if not all(awaited.is_answered for awaited in self._awaited):
                self._leave(session)

    def _leave(self, session: Session) -> None:
        """The client has gone: calls that no other client waits for are cancelled after a grace period."""
        calls = [call for call_id in self._call_ids if (call := session.calls.get(call_id)) is not None]
        self._executor.leave(calls, loop_time_s())

    async def _whole(self, session: Session, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while not all(awaited.is_answered for awaited in self._awaited):
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            self._give_up(session)
        names = [one.name for one in self._awaited]
        truncated = list(filter(session.was_cut, names))
        errors = [awaited.error for awaited in self._awaited if awaited.error is not None]
        answer: dict[str, Any] = self._described() | {
            "values": {one.name: one.value for one in self._awaited if one.value is not None},
            "truncated": truncated,
            "errors": {one.name: one.error.error_object for one in self._awaited if one.error is not None},
        }
        status, headers = 200, with_slo(JSON, self._awaited)
        stopping = [one for one in errors if isinstance(one, GatewayStoppingError)]  # errors of no variable
        if stopping or len(errors) == len(self._awaited):
            error = (*stopping, *errors)[0]
            answer["error"], status, headers = error.error_object, error.status, error_headers(error)
        await send_whole(send, status, await self._stored(headers), msgspec.json.encode(answer))

    async def _stream(self, session: Session, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": await self._stored(EVENT_STREAM)})
        events, due = ProgramEvents(session, self._awaited), list[Event]()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_events(events, due, send)
        except TimeoutError:
            self._give_up(session)
        last = await self._once_stored([*due, *events.new(), Event("done", self._described() | slo_of(self._awaited))])
        await send({"type": "http.response.body", "body": last})

    async def _send_events(self, events: ProgramEvents, due: list[Event], send: Send) -> None:
        """Send new events until every awaited variable has had its last event. A slow client gets several at once.

        If the time-out cancels this method, `due` has the events that still wait for their commit.
        """
        while not events.is_over:
            due += events.new()
            if due:
                body = await self._once_stored(due)
                due.clear()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            else:
                await next_change(self._changed, send, self._keep_alive_s)

    async def _once_stored(self, events: Sequence[Event]) -> bytes:
        """Encode events, after the commit of what they report.

        Deltas alone need no commit: a retry may generate another text anyway.
        """
        if any(one.kind != DELTA for one in events):
            events = await self._session.record.once_stored([*events], unstored_events, is_begun=True)
        return b"".join(event(*one) for one in events)

    async def _stored(self, headers: Headers) -> Headers:
        """Wait for the commit of the program. Returns the headers, marked if the program could not be stored."""
        return await self._session.record.once_stored(headers, unstored_headers)

    def _give_up(self, session: Session) -> None:
        for awaited in self._awaited:
            if not awaited.is_answered:
                awaited.give_up(session, self._timeout_s)

    def _described(self) -> dict[str, Any]:
        return {"object": "program", "session": self._session.session_id}
