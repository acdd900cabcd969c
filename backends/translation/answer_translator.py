"""The translator of one answer: reads chat completions, lets the API's turn grow, and writes what the turn says.

Whole answers and chunks become the parts that an assistant's turn is made of. A stream's parts are told in the order of
the grammar that `docs/translation.md` has as a table.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from plait.backends.errors import EngineError, EngineGarbledError
from plait.backends.translation.chat_answer import (
    CallPiece,
    ChatAnswer,
    Reasoning,
    Refusal,
    Text,
    Usage,
    finish_reason,
    pieces,
    read_answer,
    stop_string,
)
from plait.backends.translation.tool_calls import ToolCall, ToolCalls


@dataclass(frozen=True, slots=True)
class Identity:
    """`key` makes the ids of an answer and of its parts. `created_s` is the Unix time."""

    key: str
    created_s: int


def new_identity() -> Identity:
    """A key that no other answer has, and the present. It is the only place of this room that is not pure."""
    return Identity(uuid.uuid4().hex, int(time.time()))


Event = Mapping[str, Any]
"""The data of an event. Its `type` is also the event's name."""


def read_events(events: bytes) -> Iterator[tuple[list[bytes], bytes | None]]:
    """The comments and the data of each event. The data is None if the event has none, or an empty one."""
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


def write_event(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), msgspec.json.encode(event))


Part = Reasoning | Text | Refusal | ToolCall

DONE = b"[DONE]"


class Turn(Protocol):
    """An assistant's turn in one API. Each method returns the events that tell a client of the change."""

    def begin(self, model: str, usage: Usage) -> Iterable[Event]:
        """The turn's first events. `model` is the one that the engine names, `usage` what is known so far."""
        ...

    def wait(self) -> Iterable[Event]:
        """Tell that the turn goes on, although nothing comes. The turn may not have begun."""
        ...

    def take(self, part: Part) -> Iterable[Event]:
        """Add a part. A call is complete."""
        ...

    def end(self, finish_reason: str, stop: str | None, usage: Usage) -> Iterable[Event]:
        """End the turn. `finish_reason` is OpenAI's, or empty; `stop` is the stop string that was found."""
        ...

    def fail(self, error: Mapping[str, Any]) -> Iterable[Event]:
        """End the turn with OpenAI's error object. The turn may not have begun."""
        ...

    def answer(self) -> dict[str, Any]:
        """The answer's object, as far as the turn has come."""
        ...


SIGN_CHARACTERS: Final = 512
"""A client gets a sign of life for so much of calls that waits here: at 20 tokens/s, some 6 s."""


class TurnTranslator:
    """Implements AnswerTranslator over a turn.

    Text goes on as it comes. Calls wait for the end of the answer, which alone says that they are complete.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._begun = False
        self._ended = False
        self._calls = ToolCalls()
        self._untold = 0
        self._finish_reason = ""
        self._stop: str | None = None
        self._usage = Usage()

    def expect(self, usage: Usage) -> None:
        """Take these counts until the engine tells its own."""
        self._usage = usage

    def whole(self, answer: bytes) -> bytes:
        """The answer's object for a `chat.completion`. Raises EngineGarbledError if it is none."""
        read = read_answer(answer)
        if not read.choices:
            raise EngineGarbledError("The engine's answer is not a chat completion: it has no choices.")
        self._take(read, self._calls.add_whole)
        self._end()
        return msgspec.json.encode(self._turn.answer())

    def feed(self, events: bytes) -> bytes:
        """The turn's events for whole events of a chat stream."""
        written = bytearray()
        for comments, data in read_events(events):
            written += write_comments(comments)
            for event in () if self._ended else self._turn.wait() if data is None else self._events(data):
                written += write_event(event)
        return bytes(written)

    def _events(self, data: bytes) -> list[Event]:
        if data.strip() == DONE:
            return self._end()
        try:
            return self._take(read_answer(data), self._calls.add)
        except EngineError as error:
            return self._fail(error.error_object)

    def _take(self, answer: ChatAnswer, add_call: Callable[[CallPiece], None]) -> list[Event]:
        if answer.error is not None:
            error = answer.error
            return self._fail(error if isinstance(error, dict) else {"message": str(error)})
        events, choice = self._begin(answer.model), answer.choice
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
