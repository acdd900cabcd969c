"""The sink of a stream that may send keep-alive comments to the client. `silent_streams` decides when."""

from __future__ import annotations

from typing import Final

from plait.backends.errors import EngineGarbledError, PlaitError
from plait.gateway.answers.completions import AnswerForm
from plait.gateway.answers.error_texts import error_of
from plait.gateway.asgi import EVENT_STREAM, Headers, Sink, Stage

OURS: Final = b"plait-"
"""Headers with this prefix go into a comment if the status was sent before they were known."""


class CommentedSink(Stage):
    """The sink of a stream whose client may get comments before its answer begins.

    `has_begun`: the first comment has sent status 200. Plait's headers then follow as a comment, and an error follows
    as an event.
    """

    def __init__(self, sink: Sink, form: AnswerForm, call_id: str) -> None:
        super().__init__(sink)
        self.has_begun = False
        self._form = form
        self._call_id = call_id
        self._failed_status: int | None = None
        self._parts: list[bytes] = []

    def tell(self, comment: str) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._to.start(200, [*EVENT_STREAM, (b"x-request-id", self._call_id.encode("latin-1"))])
        self._to.write(self._form.sign_of_life(comment, has_begun=False))

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """Write a whole answer. If status 200 was sent before, the client expects events, so it gets an error event."""
        if self.has_begun and status == 200:
            self.fail(EngineGarbledError("The engine answered without a stream."))
        elif self.has_begun:
            self.start(status, headers)
            self.end(bytes(body))
        else:
            self._to.whole(status, headers, body)

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer. If status 200 was sent before, the body of another status becomes an error event."""
        if not self.has_begun:
            self._to.start(status, headers)
        elif status != 200:
            self._failed_status = status
        else:
            ours = [name + b"=" + value for name, value in headers if name.startswith(OURS)]
            self._to.write(b": " + b" ".join(ours) + b"\n\n")  # not joined with events, which may be translated

    def write(self, body: bytes) -> None:
        if self._failed_status is None:
            self._to.write(body)
        else:
            self._parts.append(body)

    def end(self, body: bytes = b"") -> None:
        if self._failed_status is None:
            self._to.end(body)
        else:
            self.fail(error_of(self._failed_status, b"".join([*self._parts, body])))

    def fail(self, error: PlaitError) -> None:
        """End the stream with an error event, because the status was sent already."""
        self._to.end(self._form.errors.event(error))
