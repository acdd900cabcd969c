"""Translates one answer: reads chat completions, lets the API's turn grow, and writes what the turn says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from plait.backends.errors import EngineError, EngineGarbledError
from plait.backends.translation.chat_answer import ChatAnswer, Part, Usage, read_answer
from plait.backends.translation.events import Event, read_events, write_comments, write_event

DONE = b"[DONE]"


class Turn(Protocol):
    """An assistant's turn in one API. Each method returns the events that tell a client of the change."""

    def begin(self, model: str) -> Iterable[Event]:
        """The turn's first events. `model` is the one that the engine names."""
        ...

    def take(self, part: Part) -> Iterable[Event]:
        """Add a part."""
        ...

    def end(self, finish_reason: str | None, stop: str | None, usage: Usage) -> Iterable[Event]:
        """End the turn. `finish_reason` is OpenAI's; `stop` is the stop string that was found."""
        ...

    def fail(self, error: Mapping[str, Any]) -> Iterable[Event]:
        """End the turn with OpenAI's error object. The turn may not have begun."""
        ...

    def answer(self) -> dict[str, Any]:
        """The answer's object, as far as the turn has come."""
        ...


class TurnTranslator:
    """Implements AnswerTranslator over a turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._begun = False
        self._ended = False
        self._finish_reason: str | None = None
        self._stop: str | None = None
        self._usage = Usage()

    def whole(self, answer: bytes) -> bytes:
        """The answer's object for a `chat.completion`. Raises EngineGarbledError if it is none."""
        read = read_answer(answer)
        if not read.choices:
            raise EngineGarbledError("The engine's answer is not a chat completion: it has no choices.")
        self._take(read)
        self._end()
        return msgspec.json.encode(self._turn.answer())

    def feed(self, events: bytes) -> bytes:
        """The turn's events for whole events of a chat stream."""
        written = bytearray()
        for comments, data in read_events(events):
            written += write_comments(comments)
            for event in self._events(data) if data is not None and not self._ended else ():
                written += write_event(event)
        return bytes(written)

    def _events(self, data: bytes) -> list[Event]:
        if data.strip() == DONE:
            return self._end()
        try:
            return self._take(read_answer(data))
        except EngineError as error:
            return self._fail(error.error_object)

    def _take(self, answer: ChatAnswer) -> list[Event]:
        if answer.error is not None:
            error = answer.error
            return self._fail(error if isinstance(error, dict) else {"message": str(error)})
        events = list[Event]() if self._begun else list(self._turn.begin(answer.model))
        self._begun = True
        for part in answer.parts():
            events += self._turn.take(part)
        self._finish_reason = answer.finish_reason or self._finish_reason
        self._stop = answer.stop or self._stop
        self._usage = answer.usage or self._usage
        return events

    def _end(self) -> list[Event]:
        events = list[Event]() if self._begun else list(self._turn.begin(""))
        self._begun = self._ended = True
        return [*events, *self._turn.end(self._finish_reason, self._stop, self._usage)]

    def _fail(self, error: Mapping[str, Any]) -> list[Event]:
        self._ended = True
        return list(self._turn.fail(error))
