"""The comments in a stream that waits for an engine. They keep the client and proxies from giving up.

After some seconds the status goes out, and with it a comment that says how long the wait is. Comments follow until the
answer comes. The headers that are known only then come as one more comment, and an error comes as an event.
"""

from __future__ import annotations

from typing import Final

from starlette.types import Message, Send

from plait.backends.errors import PlaitError
from plait.gateway.answers.answer_forms import AnswerForm, error_of
from plait.gateway.asgi import Headers

OURS: Final = b"plait-"
"""Headers with this prefix are told in a comment once the status has gone out."""


class HeldStream:
    """ASGI's send for a stream that may have to wait. `has_begun` says that the client has the status already."""

    def __init__(self, to_client: Send, form: AnswerForm, call_id: str) -> None:
        self.has_begun = False
        self._to_client = to_client
        self._form = form
        self._call_id = call_id
        self._failed_status: int | None = None
        self._parts: list[bytes] = []

    async def waits(self, position: int, expected_s: float) -> None:
        """Tell the client that its call is the tenant's `position`th that waits, and for how long it is expected to."""
        if not self.has_begun:
            self.has_begun = True
            headers: Headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-request-id", self._call_id.encode("latin-1")),
            ]
            await self._to_client({"type": "http.response.start", "status": 200, "headers": headers})
        note = self._form.waiting_event(position, expected_s)
        await self._to_client({"type": "http.response.body", "body": note, "more_body": True})

    async def send(self, message: Message) -> None:
        """ASGI's send."""
        if not self.has_begun:
            await self._to_client(message)
        elif message["type"] == "http.response.start":
            await self._start(message)
        elif self._failed_status is None:
            await self._to_client(message)
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self.fail(error_of(self._failed_status, b"".join(self._parts)))

    async def fail(self, error: PlaitError) -> None:
        """The call has failed. The status has gone out, so the error is an event, and the last one."""
        await self._to_client({"type": "http.response.body", "body": self._form.error_event(error)})

    async def _start(self, message: Message) -> None:
        """An answer begins, to a client that has its status already."""
        if message["status"] != 200:
            self._failed_status = message["status"]
            return
        ours = [name + b"=" + value for name, value in message["headers"] if name.startswith(OURS)]
        note = b": " + b" ".join(ours) + b"\n\n"  # on its own: the events may have to be translated
        await self._to_client({"type": "http.response.body", "body": note, "more_body": True})
