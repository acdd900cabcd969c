"""A response in the background: its events can be told again, from any number on, also when it has ended.

So they do not depend on how the engine cuts its stream: a text is told in pieces of equal length, or by token if the
client wants logprobs. A response that is generated again has the same events if the model says the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from plait.backends.translation.answer_translator import Event, Identity, Part
from plait.backends.translation.chat_answer import Reasoning, Refusal, Text, Usage
from plait.backends.translation.fields import Json
from plait.backends.translation.responses import CallItem, ResponseTurn, error_event
from plait.backends.translation.responses_tools import CALL_ITEMS, TOOL_KINDS

PREFIX: Final = "resp_"
"""Begins the id of a response. The key of its identity follows."""

PIECE_CHARACTERS: Final = 8
"""The length of a delta: about two tokens, so that there are fewer events than tokens."""

_IN_PROGRESS: Final = frozenset(("queued", "in_progress"))
_OF_THE_END: Final = ("status", "error", "incomplete_details", "usage")
_HEAD: Final = frozenset(("id", "type", "call_id", "status"))
"""The fields of every item that is a call."""


class BackgroundTurn(ResponseTurn):
    """A turn that begins with `queue`. No event is a sign of life: these would be numbered, too."""

    def __init__(self, fields: Mapping[str, Any], identity: Identity) -> None:
        super().__init__({name: value for name, value in fields.items() if name != "input"}, identity)
        self._response |= {"status": "queued", "background": True}
        self._kind: type[Reasoning | Text | Refusal] = Text
        self._rest = ""  # of a text, shorter than a piece

    @property
    def is_over(self) -> bool:
        return self._response["status"] not in _IN_PROGRESS

    def queue(self) -> list[Event]:
        """`response.created` and `response.queued`."""
        return [self._lifecycle("created"), self._lifecycle("queued")]

    def begin(self, model: str, usage: Usage) -> list[Event]:  # noqa: ARG002 - a Turn
        """`response.in_progress`, once. The model is called what the client calls it."""
        if self._response["status"] != "queued":
            return []
        self._response["status"] = "in_progress"
        return [self._lifecycle("in_progress")]

    def wait(self) -> Iterable[Event]:
        return ()

    def take(self, part: Part) -> Iterable[Event]:
        """The pieces of a text that are whole by now, or all of a call."""
        if not isinstance(part, Reasoning | Text | Refusal):
            return [*self._flush(), *super().take(part)]
        if isinstance(part, Text) and part.logprobs and self._logprobs:
            events = self._flush()
            for token in _tokens(part):
                events += super().take(token)
            return events
        events = [] if self._kind is type(part) else self._flush()
        self._kind, text = type(part), self._rest + part.text
        whole = len(text) - len(text) % PIECE_CHARACTERS
        for start in range(0, whole, PIECE_CHARACTERS):
            events += super().take(self._kind(text[start : start + PIECE_CHARACTERS]))
        self._rest = text[whole:]
        return events

    def end(self, finish_reason: str, stop: str | None, usage: Usage) -> Iterable[Event]:
        return [*self._flush(), *super().end(finish_reason, stop, usage)]

    def fail(self, error: Mapping[str, Any]) -> Iterable[Event]:
        """What is left of a text, `response.failed` and an `error` event."""
        return [*self.begin("", Usage()), *self._flush(), *super().fail(error)]

    def cancel(self) -> list[Event]:
        """What is left of a text, and the end of its item. OpenAI has no event for a response that was cancelled."""
        events = [*self.begin("", Usage()), *self._flush(), *self._close("incomplete")]
        self._response["status"] = "cancelled"
        return events

    def repeat(self, response: Mapping[str, Any]) -> Iterator[Event]:
        yield from self.queue()
        yield from self.begin("", Usage())
        self._logprobs = True  # of tokens that have some
        for item in response["output"]:
            if item["type"] in CALL_ITEMS:
                yield from self._repeat_call(item)
            for part in _parts(item):
                yield from self.take(part)
        yield from self._flush()
        status = response["status"]
        if status != "failed":
            yield from self._close("completed" if status == "completed" else "incomplete")
        self._response |= {name: response[name] for name in _OF_THE_END}
        if status != "cancelled":
            yield self._lifecycle(status)
        if status == "failed":
            yield error_event(response["error"], self._next_number())

    def _repeat_call(self, item: Json) -> Iterator[Event]:
        yield from self._flush()
        fields = {name: value for name, value in item.items() if name not in _HEAD}
        kind = TOOL_KINDS[CALL_ITEMS[item["type"]]]
        call = CallItem(self._key, len(self._items), item["call_id"], kind, fields)
        yield from self._opened(call)
        yield from self._numbered(call.told())

    def _flush(self) -> list[Event]:
        rest, self._rest = self._rest, ""
        return list(super().take(self._kind(rest))) if rest else []


def replayed(response: Mapping[str, Any]) -> list[Event]:
    """The events of a response in the background that has ended, with the numbers that they had."""
    identity = Identity(str(response["id"]).removeprefix(PREFIX), response["created_at"])
    return list(BackgroundTurn(response, identity).repeat(response))


def _tokens(part: Text) -> list[Text]:
    """The tokens of a text; all of it as one if they are not the text, such as with a part of a character."""
    tokens = [token.get("token") for token in part.logprobs]
    if "".join(token for token in tokens if isinstance(token, str)) != part.text:
        return [part]
    return [Text(str(token.get("token")), (token,)) for token in part.logprobs]


def _parts(item: Json) -> Iterator[Reasoning | Text | Refusal]:
    """The texts of a message or a reasoning item."""
    for content in item.get("content") or ():
        match content["type"]:
            case "output_text":
                yield Text(content["text"], tuple(content["logprobs"]))
            case "refusal":
                yield Refusal(content["refusal"])
            case "reasoning_text":
                yield Reasoning(content["text"])
