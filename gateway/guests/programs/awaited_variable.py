"""The `get` of a variable: waits for its value, or streams its text as it is generated.

A stream survives a retry of the call if the new text begins with the text that was sent (`ShownText`). The criteria of
a get are those of Parrot (section 7): an objective, or limits in milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.backends.errors import GatewayStoppingError, PlaitError, WaitTimeoutError
from plait.gateway.asgi import EVENT_STREAM, ClientGoneError, Headers, send_whole, unless_gone
from plait.gateway.calls.annotations import NO_ANNOTATIONS, Annotations, Given
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import GrowingText
from plait.gateway.guests.programs.core.session import Getter, Session
from plait.gateway.guests.programs.core.session_errors import text_changed, variable_failed
from plait.gateway.guests.programs.recorded_answer import KEEP_ALIVE
from plait.gateway.guests.programs.unstored import unstored_error, unstored_fields, unstored_headers
from plait.gateway.timer import loop_time_s
from plait.policy.programs.needs import Mark
from plait.policy.programs.request_graph_state import Cause, VariableState
from plait.policy.types import NO_SLO, Objective, Slo

Json = dict[str, Any]

JSON: Final[Headers] = ((b"content-type", b"application/json"),)


class TextChangedError(Exception):
    """A retry has generated a text that does not begin with the text that the client was sent."""


_NO_TEXT: Final = GrowingText()
"""The empty text of a variable whose call has generated none yet."""


class ShownText:
    """The position of one stream in a growing text. The text is copied only after a retry.

    A retry generates a new text, which has to begin with the text that was sent. The stream sends nothing until the new
    text is longer than the sent one.
    """

    def __init__(self) -> None:
        self._text = _NO_TEXT
        self._shown = 0  # the number of characters sent
        self._repeats = ""  # after a retry: the sent text, which the new text has to repeat
        self._repeated = 0  # how many characters of `_repeats` the new text has repeated

    def new_text(self, text: GrowingText) -> str:
        """The characters of a growing text that were not sent yet. Raises `TextChangedError`."""
        if text is not self._text:
            if not self._repeats:
                self._repeats = str(self._text)[: self._shown]
            self._text, self._repeated = text, 0
        if self._repeats:
            come = text.since(self._repeated)
            due = self._repeats[self._repeated : self._repeated + len(come)]
            if not come.startswith(due):
                raise TextChangedError
            self._repeated += len(due)
            if self._repeated < len(self._repeats):
                return ""
            self._repeats = ""
        more = text.since(self._shown)
        self._shown += len(more)
        return more

    def rest(self, value: str) -> str:
        """The characters of the whole text `value` that were not sent yet. Raises `TextChangedError`."""
        if not value.startswith(self._repeats or str(self._text)[: self._shown]):
            raise TextChangedError
        return value[self._shown :]


KEPT, AT_RISK, MISSED = "expected", "at-risk", "missed"
"""The value came within the JCT; the client waits no longer, but the JCT is not over; neither of these."""


class AwaitedVariable:
    """One wait for a variable. At its end, `value` or `error` is set, and with a JCT `slo`.

    The event `changed` is set when the text has grown, and at the end. `mark` is the objective or SLO that the get asks
    for. With `streamed`, `new_text` returns the text as it grows.
    """

    def __init__(self, variable: str, mark: Mark | None, changed: asyncio.Event, *, streamed: bool) -> None:
        self.value: str | None = None
        self.error: PlaitError | None = None
        self.slo: str | None = None
        self._changed = changed
        self._text = _NO_TEXT
        self._shown = ShownText()
        self._is_shown = False  # `new_text` has returned the rest of the value
        self.name = variable
        self.getter = Getter(variable, self._on_value, self._on_failed, mark, self._on_delta if streamed else None)

    def release(self, executor: Executor, session: Session) -> None:
        """End the wait. Deletes the getter, to break the reference cycle with it."""
        executor.variables.release(session, self.getter, loop_time_s())
        del self.getter

    @property
    def is_answered(self) -> bool:
        return self.value is not None or self.error is not None

    def new_text(self) -> str:
        """The text that was not returned yet. Sets `error` if a retry has changed the returned text."""
        if self._is_shown:
            return ""
        try:
            if self.value is None:
                return self._shown.new_text(self._text)
            self._is_shown = True
            return self._shown.rest(self.value)
        except TextChangedError:
            self.value, self.error = None, text_changed(self.name)
            return ""

    def give_up(self, session: Session, waited_s: float) -> None:
        state = session.state_of(self.name)
        hint = "; nobody produces it so far" if state is VariableState.EMPTY else ""
        self.error = WaitTimeoutError(
            f"The variable '{self.name}' is still {state} after {waited_s:g} s{hint}. Get it again."
        )
        self._end(AT_RISK)

    def _end(self, in_time: str) -> None:
        left_s = self.getter.left_s(loop_time_s())
        if left_s is not None:
            self.slo = in_time if left_s >= 0 else MISSED
        self._changed.set()

    def _on_delta(self, text: GrowingText) -> None:
        self._text = text
        self._changed.set()

    def _on_value(self, value: str) -> None:
        self.value = value
        self._end(KEPT)

    def _on_failed(self, error: PlaitError) -> None:
        self.error = error
        self._end(MISSED)


Milliseconds = Annotated[float, Meta(gt=0, le=1e12)]


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a get in milliseconds, named as in a call's `plait`. Names without `slo_` are older aliases."""

    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None
    slo_jct_ms: Milliseconds | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    jct_ms: Milliseconds | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "jct_ms"):
            older, newer = getattr(self, name), getattr(self, f"slo_{name}")
            if older is not None and newer not in (None, older):
                raise ValueError(f"slo_{name} and {name} are the same objective; give one of them")

    def slo(self) -> Slo:
        return Slo(
            _seconds(self.slo_ttft_ms or self.ttft_ms),
            _seconds(self.slo_tpot_ms or self.tpot_ms),
            _seconds(self.slo_jct_ms or self.jct_ms),
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


Criteria = Objective | Figures
_KEYS: Final = ("slo_ttft_ms", "slo_tpot_ms", "slo_jct_ms")


def mark_of(criteria: Criteria | None, annotations: Annotations = NO_ANNOTATIONS) -> Mark | None:
    """The objective or SLO of a get; None if it has none. `annotations` are read with the criteria (`given_by`)."""
    if annotations.mark is not None:
        return annotations.mark
    mark = criteria.slo() if isinstance(criteria, Figures) else criteria
    return None if mark == NO_SLO else mark


def given_by(criteria: Criteria | None, place: str) -> list[Given]:
    """The criteria at a `place` in the body, as annotations."""
    if not isinstance(criteria, Figures):
        return [(place, "objective", criteria)]
    return [(f"{place}.{key}", key, getattr(criteria, key) or getattr(criteria, key[4:])) for key in _KEYS]


def slo_of(awaited: Iterable[AwaitedVariable]) -> Json:
    """The field `slo` of the last event: that of the worst wait; empty without a JCT."""
    told = {one.slo for one in awaited}
    return next(({"slo": slo} for slo in (MISSED, AT_RISK, KEPT) if slo in told), {})


def with_slo(headers: Headers, awaited: Iterable[AwaitedVariable]) -> Headers:
    """The same as the header `plait-slo`."""
    return [*headers, *((b"plait-slo", slo.encode()) for slo in slo_of(awaited).values())]


class VariableResponse(Response):
    """The answer to a get: waits up to `timeout_s` for the variable. `mark` is the objective or SLO of the get."""

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
        self._executor.variables.get(self._session, self._awaited.getter, loop_time_s())
        is_whole = self._keep_alive_s is None or self._awaited.error is not None
        try:
            await unless_gone(receive, self._whole(send) if is_whole else self._stream(send))
        except ClientGoneError:
            return
        finally:
            self._awaited.release(self._executor, self._session)

    async def _whole(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._changed.wait()
        except TimeoutError:
            self._awaited.give_up(self._session, self._timeout_s)
        error = self._awaited.error
        if isinstance(error, GatewayStoppingError):
            raise error  # not the variable's error, so there is no commit to wait for
        if error is not None:
            raise await self._session.record.once_stored(error, unstored_error)
        body = msgspec.json.encode(self._set())
        headers = with_slo(JSON, [self._awaited])
        await send_whole(send, 200, await self._session.record.once_stored(headers, unstored_headers), body)

    async def _stream(self, send: Send) -> None:
        headers = EVENT_STREAM if self._session.record.is_durable else unstored_headers(EVENT_STREAM)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_deltas(send)
        except TimeoutError:
            self._awaited.give_up(self._session, self._timeout_s)
        await send({"type": "http.response.body", "body": await self._ending()})

    async def _ending(self) -> bytes:
        """The last events of the stream, after the commit of the value or the failure that they report."""
        rest = self._delta(self._awaited.new_text())
        error = self._awaited.error
        fields = (self._set() if error is None else {"error": error.error_object}) | slo_of([self._awaited])
        try:
            fields = await self._session.record.once_stored(fields, unstored_fields, is_begun=True)
        except PlaitError as unknown:
            return _event(unknown.body())
        return rest + _event(msgspec.json.encode(fields)) + (b"data: [DONE]\n\n" if error is None else b"")

    async def _send_deltas(self, send: Send) -> None:
        """Send the text as it is generated, until the variable has its value or has failed.

        Nothing is queued for a client that reads slowly: its next delta has all the text since the last one.
        """
        while not self._awaited.is_answered:
            await next_change(self._changed, send, self._keep_alive_s)
            await self._send_delta(send)

    async def _send_delta(self, send: Send) -> None:
        """Send the new text while the variable has no value. `_ending` sends the rest, after the commit."""
        if not self._awaited.is_answered and (delta := self._delta(self._awaited.new_text())):
            await send({"type": "http.response.body", "body": delta, "more_body": True})

    def _delta(self, text: str) -> bytes:
        delta = {"object": "semantic_variable.delta", "semantic_var_id": self._awaited.name, "delta": text}
        return _event(msgspec.json.encode(delta)) if text else b""

    def _set(self) -> Json:
        variable = self._awaited.name
        return described(
            self._session.session_id, variable, "set", self._awaited.value, was_cut=self._session.was_cut(variable)
        )


async def next_change(changed: asyncio.Event, send: Send, keep_alive_s: float | None) -> None:
    """Wait until `changed` is set, and clear it. Sends an SSE comment every `keep_alive_s` (None: no comments)."""
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
    """The API's object for a variable.

    `cause`: why the variable failed; None if it has not. `was_cut`: its text ended at the output limit.
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
