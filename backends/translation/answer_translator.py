"""Translates one answer: reads chat completions into parts, adds the parts to the API's turn, writes the turn's events.

A `Turn` is the state of an assistant's message in one API: `begin`, then `take` for each part, then `end` or `fail`. A
whole answer is the object that the turn has become, so it cannot differ from a stream. `docs/translation.md` has the
grammar of each API's events.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from plait.backends.errors import EngineError, EngineGarbledError
from plait.backends.protocol.api_errors import Event, write_event
from plait.backends.protocol.plain_events import PlainEvents
from plait.backends.translation.chat_answer import (
    CallPiece,
    ChatAnswer,
    Reasoning,
    Refusal,
    Text,
    Usage,
    finish_reason,
    only_text,
    pieces,
    read_answer,
    stop_string,
)
from plait.backends.translation.tool_calls import ToolCall, ToolCalls


@dataclass(frozen=True, slots=True)
class Identity:
    """The `key` from which the ids of an answer and of its parts are made, and the answer's Unix time."""

    key: str
    created_s: int


def new_identity() -> Identity:
    """A random key and the present time: the only function of this room that is not pure."""
    return Identity(uuid.uuid4().hex, int(time.time()))


def read_events(events: bytes) -> Iterator[tuple[list[bytes], bytes | None]]:
    """The comments and the data of each event. Empty data is None."""
    lines = events.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for event in lines.split(b"\n\n"):
        comments, data = list[bytes](), list[bytes]()
        for line in event.split(b"\n"):
            if line.startswith(b":"):
                comments.append(line)
            elif line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
        said = b"\n".join(data).strip()
        if comments or said:
            yield comments, said or None


def write_comments(comments: Iterable[bytes]) -> bytes:
    """Comments as an event without data; no bytes without comments."""
    lines = b"\n".join(comments)
    return lines + b"\n\n" if lines else b""


Part = Reasoning | Text | Refusal | ToolCall

DONE = b"[DONE]"


class Turn(Protocol):
    """An assistant's turn in one API. Each method returns the events of its change for the client."""

    def begin(self, model: str, usage: Usage) -> Iterable[Event]:
        """Begin. `model` is the engine's name for the model, `usage` the counts known so far."""
        ...

    def wait(self) -> Iterable[Event]:
        """A keep-alive event. The turn may not have begun."""
        ...

    def take(self, part: Part) -> Iterable[Event]:
        """Add a part. A call comes only once it is complete."""
        ...

    def end(self, finish_reason: str, stop: str | None, usage: Usage) -> Iterable[Event]:
        """End. `finish_reason` is OpenAI's, or empty; `stop` is the stop string that was found."""
        ...

    def fail(self, error: Mapping[str, Any]) -> Iterable[Event]:
        """End with OpenAI's error object. The turn may not have begun."""
        ...

    def answer(self) -> dict[str, Any]:
        """The API's object for the turn so far."""
        ...


SIGN_CHARACTERS: Final = 512
"""How much of a call's arguments is held before a keep-alive event: some 6 s at 20 tokens/s."""


class TurnTranslator:
    """Translates the answer to one request into a turn: `whole` once, or `feed` for a stream from its first event on.

    Text is passed on at once. Calls are held until the answer's end, because only then are they known to be complete.
    """

    def __init__(self, turn: Turn) -> None:
        self.problem: EngineError | None = None
        """Why the answer cannot be translated, and has ended with an error event."""
        self._turn = turn
        self._begun = False
        self._ended = False
        self._calls = ToolCalls()
        self._untold = 0
        self._finish_reason = ""
        self._stop: str | None = None
        self._usage = Usage()
        self._plain = PlainEvents()
        self._kind: type[Text | Reasoning] = Text  # of the plain events' texts
        self._only: Text | Reasoning | None = None  # what the latest event had, if it had nothing else

    def expect(self, usage: Usage) -> None:
        """Use these counts until the engine reports its own: a stream's first event may need some."""
        self._usage = usage

    def whole(self, answer: bytes) -> bytes:
        """The API's object for a `chat.completion`. Raises EngineGarbledError for anything else."""
        read = read_answer(answer)
        if not read.choices:
            raise EngineGarbledError("The engine's answer is not a chat completion: it has no choices.")
        self._take(read, self._calls.add_whole)
        self._end()
        return msgspec.json.encode(self._turn.answer())

    def feed(self, events: bytes) -> bytes:
        """The API's events for whole events of a chat stream, however the stream is cut into calls of `feed`.

        Comments stay comments; one alone also becomes the API's own keep-alive event. An error event becomes the API's
        error event and ends the stream. `[DONE]` becomes the stream's last events. Empty if the API has no counterpart.
        """
        return b"".join(self.told(events))

    def told(self, events: bytes) -> list[bytes]:
        """The client's comments and events, one by one, for whole events of the engine."""
        text = None if self._ended else self._plain.text(events)
        if text is not None:
            return [*map(write_event, self._turn.take(self._kind(text)))] if text else []
        told, number = list[bytes](), 0
        for number, (comments, data) in enumerate(read_events(events), 1):  # noqa: B007 - how many there were
            if comments:
                told.append(write_comments(comments))
            if not self._ended:
                told += map(write_event, self._turn.wait() if data is None else self._events(data))
        if self._plain.looks and number == 1 and self._only is not None and self._plain.learn(events, self._only.text):
            self._kind = type(self._only)
        return told

    def _events(self, data: bytes) -> list[Event]:
        self._only = None
        if data.strip() == DONE:
            return self._end()
        try:
            return self._take(read_answer(data), self._calls.add)
        except EngineError as error:
            self.problem = error.with_traceback(None)
            return self._fail(error.error_object)

    def _take(self, answer: ChatAnswer, add_call: Callable[[CallPiece], None]) -> list[Event]:
        if answer.error is not None:
            error = answer.error
            return self._fail(error if isinstance(error, dict) else {"message": str(error)})
        events, choice = self._begin(answer.model), answer.choice
        self._only = only_text(answer) if self._plain.looks else None
        for piece in pieces(choice):
            if isinstance(piece, CallPiece):
                add_call(piece)
                events += self._held(piece)
            else:
                events += self._turn.take(piece)
        self._finish_reason = finish_reason(choice) or self._finish_reason
        self._stop = stop_string(choice) or self._stop
        self._usage = answer.usage or self._usage
        return events

    def _begin(self, model: str) -> list[Event]:
        events = list[Event]() if self._begun else list(self._turn.begin(model, self._usage))
        self._begun = True
        return events

    def _held(self, piece: CallPiece) -> Iterable[Event]:
        self._untold += len(piece.arguments)
        if self._untold < SIGN_CHARACTERS:
            return ()
        self._untold = 0
        return self._turn.wait()

    def _end(self) -> list[Event]:
        events = self._begin("")
        self._ended = True
        for call in self._calls.complete():
            events += self._turn.take(call)
        return [*events, *self._turn.end(self._finish_reason, self._stop, self._usage)]

    def _fail(self, error: Mapping[str, Any]) -> list[Event]:
        self._ended = True
        return list(self._turn.fail(error))
