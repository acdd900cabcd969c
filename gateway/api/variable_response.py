"""The answer to a `get`: a variable's value, whole once it is set, or streamed as it is generated."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.backends.errors import GatewayStoppingError, PlaitError
from plait.gateway.api.awaited_variable import AwaitedVariable
from plait.gateway.asgi import ClientGoneError, send_whole, unless_gone
from plait.gateway.programs.executor import Executor
from plait.gateway.programs.recorded_answer import KEEP_ALIVE, NOT_DURABLE
from plait.gateway.programs.session import Session
from plait.gateway.programs.session_errors import variable_failed
from plait.policy.programs.needs import Mark
from plait.policy.programs.request_graph_state import Cause

Json = dict[str, Any]
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class VariableResponse(Response):
    """Waits up to `timeout_s` for a variable of a session. `mark` is the objective that the get asks for."""

    def __init__(
        self,
        executor: Executor,
        session: Session,
        variable: str,
        *,
        mark: Mark | None,
        timeout_s: float,
        keep_alive_s: float | None,
    ) -> None:
        super().__init__()
        self._executor = executor
        self._session = session
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s  # None: not streamed
        self._changed = asyncio.Event()
        self._awaited = AwaitedVariable(variable, mark, self._changed, streamed=keep_alive_s is not None)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Wait, then answer. Raises `PlaitError` only before the first byte."""
        now_s = asyncio.get_running_loop().time
        self._executor.variables.get(self._session, self._awaited.getter, now_s())
        try:
            await unless_gone(receive, self._whole(send) if self._keep_alive_s is None else self._stream(send))
        except ClientGoneError:
            return
        finally:
            self._executor.variables.release(self._session, self._awaited.getter, now_s())

    async def _whole(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._changed.wait()
        except TimeoutError:
            self._awaited.give_up(self._session, self._timeout_s)
        headers, error = [(b"content-type", b"application/json")], self._awaited.error
        if isinstance(error, GatewayStoppingError):
            raise error  # it says nothing of the variable
        if not await self._session.record.committed():
            headers.extend(NOT_DURABLE)
        if error is not None:
            raise error
        await send_whole(send, 200, headers, msgspec.json.encode(self._set()))

    async def _stream(self, send: Send) -> None:
        awaited = self._awaited
        if awaited.error is not None:
            raise awaited.error
        headers = EVENT_STREAM if self._session.record.is_durable else [*EVENT_STREAM, *NOT_DURABLE]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_deltas(send)
        except TimeoutError:
            awaited.give_up(self._session, self._timeout_s)
        await send({"type": "http.response.body", "body": await self._ending()})

    async def _ending(self) -> bytes:
        """The last events of the stream, once they are stored."""
        try:
            await self._session.record.stored()
        except PlaitError as error:
            return _event(error.body())
        if self._awaited.error is not None:
            return _event(self._awaited.error.body())
        return _event(msgspec.json.encode(self._set())) + b"data: [DONE]\n\n"

    async def _send_deltas(self, send: Send) -> None:
        """Send the text as it is generated, then the part of the value that was not sent yet.

        A client that reads slowly gets all that has come meanwhile at once. Nothing is queued for it.
        """
        while not self._awaited.is_answered:
            await next_change(self._changed, send, self._keep_alive_s)
            await self._send_delta(send, self._awaited.news())
        await self._send_delta(send, self._awaited.news())

    async def _send_delta(self, send: Send, text: str) -> None:
        if text:
            variable = self._awaited.name
            delta = {"object": "semantic_variable.delta", "semantic_var_id": variable, "delta": text}
            await send({"type": "http.response.body", "body": _event(msgspec.json.encode(delta)), "more_body": True})

    def _set(self) -> Json:
        variable = self._awaited.name
        return described(
            self._session.session_id, variable, "set", self._awaited.value, was_cut=self._session.was_cut(variable)
        )


async def next_change(changed: asyncio.Event, send: Send, keep_alive_s: float | None) -> None:
    """Wait until `changed` is set, and clear it. Sends a comment to the stream after each `keep_alive_s`."""
    while not changed.is_set():
        try:
            async with asyncio.timeout(keep_alive_s):
                await changed.wait()
        except TimeoutError:
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
    changed.clear()


def described(
    session_id: str,
    variable: str,
    state: str,
    value: str | None,
    cause: Cause | None = None,
    *,
    was_cut: bool = False,
) -> Json:
    """A variable as the API shows it.

    `cause` is the cause of its failure, if it has failed. `was_cut` says that its text ended at its length limit.
    """
    return {
        "object": "semantic_variable",
        "semantic_var_id": variable,
        "session_id": session_id,
        "state": state,
        "value": value,
        "truncated": was_cut,
        "error": described_failure(variable, cause),
    }


def described_failure(variable: str, cause: Cause | None) -> Json | None:
    """The error object that a get of the variable returns; None if the variable has not failed."""
    return None if cause is None else variable_failed(variable, cause).error_object


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data
