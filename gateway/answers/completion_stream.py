"""The stream of a completion, chat or text: events with choices, then perhaps the usage, then `[DONE]`."""

from __future__ import annotations

from plait.backends.errors import EngineBrokenError, EngineError
from plait.gateway.answers.completion_body import (
    CompletionBody,
    UsageBounds,
    decode,
    ending_problem,
    endings,
    reported_error,
)
from plait.gateway.answers.event_stream import EventStream

_USAGE_KEY = b'"usage":'
_ERROR_KEY = b'"error":'
_DONE = b"[DONE]"
_FINISH_KEY = b'"finish_reason":'
_UNFINISHED = b'"finish_reason":null'


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
