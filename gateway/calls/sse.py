"""Reads the usage from a stream of server-sent events. Events are passed on as they are.

Pure: it takes bytes and returns bytes. If the gateway asked for the usage and the client did not, the event that
carries only the usage is withheld.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from plait.gateway.fleet.booking import CallUsage

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
_USAGE_KEY = b'"usage":'


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Body(msgspec.Struct, frozen=True):
    usage: _Usage | None = None
    choices: list[Any] | None = None


_DECODER = msgspec.json.Decoder(_Body)


class UsageTap:
    """Reads one stream. `usage` is the latest usage that the engine reported. `withhold` drops the usage-only event."""

    def __init__(self, *, withhold: bool) -> None:
        self.usage: CallUsage | None = None
        self._withhold = withhold
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk and return the events that are now complete. So the stream can be ended between two events."""
        buffer = self._rest + chunk if self._rest else chunk
        end = _end_of_last_event(buffer)
        whole, self._rest = (buffer, b"") if end == len(buffer) else (buffer[:end], buffer[end:])
        if _USAGE_KEY not in whole:
            return whole
        return b"".join(map(self._pass, _events(whole)))

    def end(self) -> bytes:
        """End the stream; returns the bytes after its last whole event."""
        rest, self._rest = self._rest, b""
        return rest

    def _pass(self, event: bytes) -> bytes:
        """The part of an event that goes to the client: all of it, or only its leading blank lines."""
        if not (self._read(event) and self._withhold):
            return event
        return event[: len(event) - len(event.lstrip(b"\r\n"))]  # they end the previous event

    def _read(self, event: bytes) -> bool:
        """Record the event's usage; True if the event carries only usage."""
        body = _decode(event.partition(b"data:")[2])
        if body is None or body.usage is None:
            return False
        self.usage = _call_usage(body.usage)
        return body.choices == []


def body_usage(body: bytes) -> CallUsage | None:
    """The usage in a response that was not streamed."""
    decoded = _decode(body)
    return None if decoded is None or decoded.usage is None else _call_usage(decoded.usage)


def _decode(data: bytes) -> _Body | None:
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):  # it goes to the client unchanged
        return None


def _call_usage(usage: _Usage) -> CallUsage:
    details = usage.prompt_tokens_details
    return CallUsage(usage.prompt_tokens, usage.completion_tokens or 0, details.cached_tokens if details else None)


def _events(buffer: bytes) -> list[bytes]:
    events, start = [], 0
    for match in _END_OF_EVENT.finditer(buffer):
        events.append(buffer[start : match.end()])
        start = match.end()
    if start < len(buffer):  # an extra blank line after the last event
        events.append(buffer[start:])
    return events


def _end_of_last_event(buffer: bytes) -> int:
    if buffer.endswith(b"\n\n"):
        return len(buffer)
    end = 0
    for separator in (b"\n\n", b"\n\r\n"):
        at = buffer.rfind(separator)
        if at >= 0:
            end = max(end, at + len(separator))
    return end
