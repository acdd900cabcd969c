"""The server-sent events of a streamed program, read line by line: texts, values and failures of its variables."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from plait.client.errors import ClientError, ErrorBody, ErrorObject
from plait.client.flow import failed_get


class News(NamedTuple):
    """What a stream says of the variable `name`: a further `piece` of its text, its whole `value`, or its `error`."""

    name: str
    piece: str | None = None
    value: str | None = None
    error: ClientError | None = None


class _Data(msgspec.Struct, frozen=True):
    name: str | None = None
    delta: str | None = None
    value: str | None = None
    error: ErrorObject | None = None


class ProgramStream:
    """Reads the lines of a stream that waits for `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def feed(self, line: str) -> News | None:
        """The news in a line; most lines have none. Raises `AnswerError` if the stream as a whole has failed."""
        if not line.startswith("data:"):
            return None  # an event's kind, which its fields tell as well; a comment; the blank line after an event
        data = msgspec.json.decode(line.removeprefix("data:"), type=_Data)
        error = None if data.error is None else ErrorBody(data.error).exception()
        if data.name is None:
            if error is not None:
                raise error
            return None  # the end
        failure = None if error is None else failed_get(error, data.name, self._timeout_s)
        return News(data.name, data.delta, data.value, failure)
