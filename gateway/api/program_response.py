"""The answer to a whole program: its values and failures at once, or as the events of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.gateway.api.awaited_variable import AwaitedVariable
from plait.gateway.api.variable_response import EVENT_STREAM, next_change
from plait.gateway.asgi import ClientGoneError, error_headers, send_whole, unless_gone
from plait.gateway.programs.chained_call import CallRunner
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.held_end import NOT_DURABLE
from plait.gateway.programs.native_step import DeclaredStep, new_step
from plait.gateway.programs.program import Program, entry
from plait.gateway.programs.session import Session
from plait.gateway.programs.slices import Pieces
from plait.gateway.programs.submitted_call import HeldSubmission, new_call
from plait.gateway.timer import loop_time_s
from plait.policy.programs.needs import Mark

JSON = [(b"content-type", b"application/json")]


class ProgramEvents:
    """What a stream still has to say of the variables that it waits for, as server-sent events."""

    def __init__(self, session: Session, awaited: Sequence[AwaitedVariable]) -> None:
        self._session = session
        self._open = list(awaited)

    @property
    def is_over(self) -> bool:
        """Whether the value or the failure of each variable has been told."""
        return not self._open

    def news(self) -> bytes:
        """All events since the last call. Texts of several pieces are one delta."""
        news = b"".join(event for awaited in self._open for event in self._of(awaited))
        self._open = [awaited for awaited in self._open if not awaited.is_answered]
        return news

    def _of(self, awaited: AwaitedVariable) -> Iterator[bytes]:
        name, text = awaited.name, awaited.news()
        if text:
            yield event("delta", {"name": name, "delta": text})
        if awaited.error is not None:
            yield event("failed", {"name": name, "error": awaited.error.error_object})
        elif awaited.value is not None:
            value = {"name": name, "value": awaited.value, "truncated": self._session.was_cut(name)}
            yield event("value", value)


def event(kind: str, data: object) -> bytes:
    """A server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))


class AskedProgram(NamedTuple):
    """A client's program, read. `gets` has the objective that is asked for each awaited variable.

    `external` are variables that others produce. `ttl_s` replaces the session's time to live. A new session outlives
    the gateway if it is `durable`.
    """

    request_id: str
    tenant: str
    session_id: str
    values: Mapping[str, str]
    calls: Sequence[HeldSubmission]
    natives: Sequence[DeclaredStep]
    gets: Mapping[str, Mark | None]
    external: frozenset[str]
    ttl_s: float | None
    durable: bool = True


class ProgramResponse(Response):
    """Enters a program into its session (`enter`), then waits up to `timeout_s` for the variables that it gets."""

    def __init__(
        self, runner: CallRunner, asked: AskedProgram, *, timeout_s: float, keep_alive_s: float | None
    ) -> None:
        super().__init__()
        self._runner = runner
        self._executor = runner.executor
        self._asked = asked
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s  # None: not streamed
        self._changed = asyncio.Event()
        self._call_ids: list[str] = []
        self._session: Session
        self._awaited = [
            AwaitedVariable(name, mark, self._changed, streamed=keep_alive_s is not None)
            for name, mark in asked.gets.items()
        ]

    async def enter(self) -> None:
        """Enter the program. Raises `PlaitError` if it is refused; then nothing of it is there."""
        asked, now_s = self._asked, loop_time_s()
        self._session = await self._runner.entrance.run(asked.tenant, asked.session_id, self._entry(now_s))
        self._asked = asked._replace(values={}, calls=(), natives=())  # the session holds them; the wait may be long

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
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
            self._release(session)
            if not all(awaited.is_answered for awaited in self._awaited):
                self._leave(session)

    def _entry(self, now_s: float) -> Pieces[Session]:
        """Make the session and enter the program. If the program is refused, a new session is removed again."""
        sessions, asked, is_whole = self._executor.sessions, self._asked, False
        known = sessions.label(asked.tenant, asked.session_id, now_s)
        session = sessions.open(asked.tenant, asked.session_id, now_s, asked.ttl_s, durable=asked.durable)
        try:
            calls = yield from self._calls(session)
            program = Program(asked.values, calls, [one.getter for one in self._awaited], asked.external)
            entered = yield from entry(self._executor, session, program, now_s)
            self._call_ids = [call.call_id for call in entered]
            is_whole = True
        finally:
            if not is_whole:
                self._release(session)
                if known is None:
                    self._executor.endings.end(session, "has ended because its program was refused", now_s)
        return session

    def _release(self, session: Session) -> None:
        for awaited in self._awaited:
            self._executor.variables.release(session, awaited.getter, loop_time_s())

    def _calls(self, session: Session) -> Pieces[dict[str, HeldCall]]:
        """The program's calls and native steps, by their places in it."""
        asked, calls = self._asked, dict[str, HeldCall]()
        for index, call in enumerate(asked.calls):
            calls[f"calls[{index}]"] = new_call(self._runner, session, call)
            yield
        for index, native in enumerate(asked.natives):
            step_id = f"{asked.request_id}:native-{index}"
            calls[f"natives[{index}]"] = new_step(self._executor, session, native, step_id)
            yield
        return calls

    def _leave(self, session: Session) -> None:
        """The client has gone."""
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
        headers = await self._stored(JSON)
        errors = [awaited.error for awaited in self._awaited if awaited.error is not None]
        answer: dict[str, Any] = self._described() | {
            "values": {one.name: one.value for one in self._awaited if one.value is not None},
            "truncated": [one.name for one in self._awaited if session.was_cut(one.name)],
            "errors": {one.name: one.error.error_object for one in self._awaited if one.error is not None},
        }
        if len(errors) < len(self._awaited):
            await send_whole(send, 200, headers, msgspec.json.encode(answer))
            return
        answer["error"] = errors[0].error_object
        await send_whole(send, errors[0].status, error_headers(errors[0]), msgspec.json.encode(answer))

    async def _stream(self, session: Session, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": await self._stored(EVENT_STREAM)})
        events = ProgramEvents(session, self._awaited)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_events(events, send)
        except TimeoutError:
            self._give_up(session)
        await session.record.committed()
        last = events.news() + event("done", self._described())
        await send({"type": "http.response.body", "body": last})

    async def _send_events(self, events: ProgramEvents, send: Send) -> None:
        """Send new events until every getter has ended. A slow client gets the events of the meantime at once."""
        while not events.is_over:
            if any(awaited.is_answered for awaited in self._awaited):
                await self._session.record.committed()
            news = events.news()
            if news:
                await send({"type": "http.response.body", "body": news, "more_body": True})
            else:
                await next_change(self._changed, send, self._keep_alive_s)

    async def _stored(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The headers of an answer that tells of the program: once that is stored, or else they say that it is not."""
        return headers if await self._session.record.committed() else [*headers, *NOT_DURABLE]

    def _give_up(self, session: Session) -> None:
        for awaited in self._awaited:
            if not awaited.is_answered:
                awaited.give_up(session, self._timeout_s)

    def _described(self) -> dict[str, Any]:
        return {"object": "program", "session": self._asked.session_id}
