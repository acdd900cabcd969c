"""Reads a stream of server-sent events on its way to the client: usage, endings, errors. The bytes stay the engine's.

Pure: bytes in, bytes out. Time is linear in the bytes, and memory is bounded by the longest event.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from plait.backends.errors import EngineBrokenError, EngineError, EngineGarbledError
from plait.gateway.answers.completion_body import (
    UNKNOWN,
    CompletionBody,
    UsageBounds,
    decode,
    ending_problem,
    endings,
    read_usage,
    reported_error,
)
from plait.gateway.fleet.booking import CallUsage

_USAGE_KEY = b'"usage":'
_ERROR_KEY = b'"error":'
_DONE = b"[DONE]"
_FINISH_KEY = b'"finish_reason":'
_UNFINISHED = b'"finish_reason":null'

MAX_EVENT_BYTES = 16 * 2**20
"""The longest event that is read. Log probabilities of a long prompt come as one event of some megabytes."""

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")


class EventStream(ABC):
    """One stream, of whatever form of events.

    `usage` is the latest usage that the engine reported, within `bounds`; `usage_corrected` is True if it had to be
    corrected. `error` is an error that the engine sent as an event. `finish` says why the first choice ended.
    """

    def __init__(self, engine_id: str, bounds: UsageBounds | None = None) -> None:
        self.usage: CallUsage | None = None
        self.usage_corrected = False
        self.error: EngineError | str | None = None
        self.finish: str | None = None
        self._engine_id = engine_id
        self._bounds = bounds or UNKNOWN
        self._pieces: list[bytes] = []  # of the event that is not whole yet
        self._rest_bytes = 0
        self._tail = b""  # the end of those pieces, in which an end of event may have begun

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk and return the events that are complete now. So a stream can be ended between two events.

        Raises `EngineGarbledError` for an event beyond `MAX_EVENT_BYTES`.
        """
        whole = self._whole_events(chunk)
        if not whole:
            return b""
        if self._says_more(whole):
            return b"".join([self._pass(event) if self._says_more(event) else event for event in _events(whole)])
        return whole

    def end(self) -> bytes:
        """End the stream; returns the bytes behind its last whole event."""
        rest = b"".join(self._pieces)
        self._pieces.clear()
        return self._pass(rest) if rest else b""

    @property
    @abstractmethod
    def problem(self) -> EngineError | str | None:
        """Why the ended stream is not a whole answer; None if it is one."""

    @abstractmethod
    def _says_more(self, events: bytes) -> bool:
        """Whether the events may hold something besides text: most have none of it, and need not be decoded."""

    @abstractmethod
    def _pass(self, event: bytes) -> bytes:
        """Record what an event says; returns the bytes of it that go to the client."""

    def _used(self, usage: object) -> None:
        """An event reported this usage."""
        self.usage, corrected = read_usage(usage, self._bounds)
        self.usage_corrected |= corrected

    def _whole_events(self, chunk: bytes) -> bytes:
        """The events that `chunk` completes."""
        if not self._pieces and chunk.endswith(b"\n\n"):
            return chunk
        seen = self._tail + chunk
        end = _end_of_last_event(seen) - len(self._tail)
        if end <= 0:
            self._keep(chunk)
            return b""
        whole = b"".join((*self._pieces, chunk[:end]))
        self._pieces.clear()
        self._rest_bytes, self._tail = 0, b""
        self._keep(chunk[end:])
        return whole

    def _keep(self, rest: bytes) -> None:
        if not rest:
            return
        self._pieces.append(rest)
        self._rest_bytes += len(rest)
        self._tail = (self._tail + rest)[-3:]
        if self._rest_bytes > MAX_EVENT_BYTES:
            message = f"engine {self._engine_id} sent an event of over {MAX_EVENT_BYTES} bytes"
            raise EngineGarbledError(message)


def _events(buffer: bytes) -> list[bytes]:
    if b"\r" not in buffer:
        *events, rest = [event + b"\n\n" for event in buffer.split(b"\n\n")]
        return events if rest == b"\n\n" else [*events, rest[:-2]]
    events, start = [], 0
    for match in _END_OF_EVENT.finditer(buffer):
        events.append(buffer[start : match.end()])
        start = match.end()
    if start < len(buffer):  # an extra blank line behind the last event
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


class CompletionStream(EventStream):
    """Reads one stream that should have `choices` endings.

    If the gateway asked for the usage and the client did not, `withhold` drops the event that carries only the usage.
    """

    def __init__(self, engine_id: str, *, withhold: bool, choices: int = 1, bounds: UsageBounds | None = None) -> None:
        super().__init__(engine_id, bounds)
        self._withhold = withhold
        self._choices = choices
        self._ended: dict[int, str] = {}
        self._is_done = False

    @property
    def problem(self) -> EngineError | str | None:
        """Why the ended stream is not a whole answer; None if it is one."""
        if self.error is not None:
            return self.error
        missing = ending_problem(self._engine_id, self._ended.values(), self._choices)
        if missing is None and not self._is_done:
            missing = EngineBrokenError(f"engine {self._engine_id} ended its stream without [DONE]")
        return missing

    def _says_more(self, events: bytes) -> bool:
        if _USAGE_KEY in events or _DONE in events or _ERROR_KEY in events:
            return True
        return events.count(_FINISH_KEY) != events.count(_UNFINISHED)

    def _pass(self, event: bytes) -> bytes:
        """Record what an event says; returns the bytes of it that go to the client.

        The end of a stream without endings is withheld: clients do not read what comes after it, and it is an error.
        """
        if event.partition(b"data:")[2].strip() == _DONE:
            self._is_done = True
            return b"" if self.error is None and self.problem is not None else event
        body = self._read(event)
        if body is None or not (self._withhold and body.only_usage):
            return event
        return event[: len(event) - len(event.lstrip(b"\r\n"))]  # blank lines before it belong to the event before

    def _read(self, event: bytes) -> CompletionBody | None:
        """Record what an event says."""
        body = decode(event.partition(b"data:")[2])
        if body is None:
            return None
        if body.usage is not None:
            self._used(body.usage)
        if body.error is not None:
            self.error = reported_error(self._engine_id, body.error)
        self._ended.update(endings(body))
        self.finish = next(iter(self._ended.values()), None)
        return body
