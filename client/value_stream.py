"""The server-sent events of a streamed `get`, read line by line: pieces of text, then the whole value or an error."""

from __future__ import annotations

import msgspec

from plait.client.errors import ConnectionFailedError, ErrorBody
from plait.client.flow import failed_get


class _Event(msgspec.Struct, frozen=True):
    delta: str | None = None
    value: str | None = None


class ValueStream:
    """Reads the lines of a stream. `value` is the variable's value once it has come."""

    def __init__(self, variable: str, timeout_s: float) -> None:
        self._variable = variable
        self._timeout_s = timeout_s
        self._given = False
        self.value: str | None = None

    def feed(self, line: str) -> str:
        """The text in a line, empty for most lines. Raises the stream's error, as `got` does."""
        if not line.startswith("data:"):
            return ""  # a comment that keeps the connection alive, or the blank line after an event
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return ""
        self._raise_error(data)
        event = msgspec.json.decode(data, type=_Event)
        if event.value is not None:
            self.value = event.value
        piece = event.delta or ""
        if event.value is not None and not self._given:
            piece = event.value  # no piece was streamed before the value
        self._given |= piece != ""
        return piece

    def close(self) -> str:
        """The value, at the end of the stream. Raises `ConnectionFailedError` if the stream ended before its value."""
        if self.value is None:
            raise ConnectionFailedError(f"the stream of {self._variable} ended before its value; get it again")
        return self.value

    def _raise_error(self, data: str) -> None:
        try:
            error = msgspec.json.decode(data, type=ErrorBody).exception()
        except msgspec.ValidationError:
            return
        raise failed_get(error, self._variable, self._timeout_s) from error
