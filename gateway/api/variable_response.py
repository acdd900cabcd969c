"""The answer to a `get`: a variable's value, whole once it is set, or streamed as it is generated."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.backends.errors import PlaitError, WaitTimeoutError
from plait.gateway.api.shown_text import ShownText, TextChangedError
from plait.gateway.asgi import ClientGoneError, send_whole, unless_gone
from plait.gateway.programs.executor import Executor
from plait.gateway.programs.getter import Getter
from plait.gateway.programs.growing_text import GrowingText
from plait.gateway.programs.recorded_answer import KEEP_ALIVE
from plait.gateway.programs.session import Session
from plait.gateway.programs.session_errors import text_changed, variable_failed
from plait.policy.programs.objectives_marks import Mark
from plait.policy.programs.request_graph_state import Cause

Json = dict[str, Any]


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
        self._text = GrowingText()
        self._value: str | None = None
        self._error: PlaitError | None = None
        on_delta = None if keep_alive_s is None else self._on_delta
        self._getter = Getter(variable, self._on_value, self._on_failed, mark, on_delta)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Wait, then answer. Raises `PlaitError` only before the first byte."""
        now_s = asyncio.get_running_loop().time
        self._executor.variables.get(self._session, self._getter, now_s())
        try:
            await unless_gone(receive, self._whole(send) if self._keep_alive_s is None else self._stream(send))
        except ClientGoneError:
            return
        finally:
            self._executor.variables.release(self._session, self._getter, now_s())

    def _on_delta(self, text: GrowingText) -> None:
        self._text = text
        self._changed.set()

    def _on_value(self, value: str) -> None:
        self._value = value
        self._changed.set()

    def _on_failed(self, error: PlaitError) -> None:
        self._error = error
        self._changed.set()

    @property
    def _is_answered(self) -> bool:
        return self._value is not None or self._error is not None

    async def _whole(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._changed.wait()
        except TimeoutError:
            raise self._timeout() from None
        if self._error is not None:
            raise self._error
        await send_whole(send, 200, [(b"content-type", b"application/json")], msgspec.json.encode(self._set()))

    async def _stream(self, send: Send) -> None:
        if self._error is not None:
            raise self._error
        kind = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_deltas(send)
        except TimeoutError:
            self._error = self._timeout()
        except TextChangedError:
            self._error = text_changed(self._getter.variable)
        if self._error is not None:
            last = _event(self._error.body())
        else:
            last = _event(msgspec.json.encode(self._set())) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": last})

    async def _send_deltas(self, send: Send) -> None:
        """Send the text as it is generated, then the part of the value that was not sent yet.

        A client that reads slowly gets all that has come meanwhile at once. Nothing is queued for it.
        """
        shown = ShownText()
        while not self._is_answered:
            await self._change(send)
            await self._send_delta(send, shown.news(self._text))
        if self._value is not None:
            await self._send_delta(send, shown.rest(self._value))

    async def _change(self, send: Send) -> None:
        """Wait for more text or the end. Sends a comment whenever neither has come for `keep_alive_s`."""
        while not self._changed.is_set():
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await self._changed.wait()
            except TimeoutError:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        self._changed.clear()

    async def _send_delta(self, send: Send, text: str) -> None:
        if text:
            variable = self._getter.variable
            delta = {"object": "semantic_variable.delta", "semantic_var_id": variable, "delta": text}
            await send({"type": "http.response.body", "body": _event(msgspec.json.encode(delta)), "more_body": True})

    def _set(self) -> Json:
        variable = self._getter.variable
        return described(
            self._session.session_id, variable, "set", self._value, was_cut=self._session.was_cut(variable)
        )

    def _timeout(self) -> WaitTimeoutError:
        variable, state = self._getter.variable, self._session.state_of(self._getter.variable)
        return WaitTimeoutError(
            f"The variable '{variable}' is still {state} after {self._timeout_s:g} s; get it again."
        )


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
