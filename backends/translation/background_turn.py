"""A response in the background, whose events can be replayed from any number on, even after the response has ended.

So the events must not depend on how the engine cuts its stream: text comes in deltas of equal length, or token by token
if the client wants logprobs. A response that is generated again has the same events if the text is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from plait.backends.protocol.api_errors import Event, response_error
from plait.backends.translation.answer_translator import Identity, Part
from plait.backends.translation.chat_answer import Reasoning, Refusal, Text, Usage
from plait.backends.translation.fields import Json
from plait.backends.translation.responses import CallItem, ResponseTurn
from plait.backends.translation.responses_tools import CALL_ITEMS, TOOL_KINDS

PREFIX: Final = "resp_"
"""The beginning of a response's id, before the key of its identity."""

PIECE_CHARACTERS: Final = 8
"""The length of a delta: about two tokens, so there are fewer events than tokens."""

_IN_PROGRESS: Final = frozenset(("queued", "in_progress"))
_OF_THE_END: Final = ("status", "error", "incomplete_details", "usage")
_HEAD: Final = frozenset(("id", "type", "call_id", "status"))
"""The fields of every item that is a call."""


class BackgroundTurn(ResponseTurn):
    """A turn that begins with `queue`. It has no keep-alive events, because they would be numbered too."""

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
        """`response.in_progress`, once. The response keeps the client's name for the model."""
        if self._response["status"] != "queued":
            return []
        self._response["status"] = "in_progress"
        return [self._lifecycle("in_progress")]

    def wait(self) -> Iterable[Event]:
        return ()

    def take(self, part: Part) -> Iterable[Event]:
        """The deltas that are full by now, or all of a call."""
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
        """The rest of a text, `response.failed` and an `error` event."""
        return [*self.begin("", Usage()), *self._flush(), *super().fail(error)]

    def cancel(self) -> list[Event]:
        """The rest of a text, and its item's end. OpenAI has no event for a cancelled response."""
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
                for piece in _pieces(part):
                    yield from self.take(piece)
        yield from self._flush()
        status = response["status"]
        if status != "failed":
            yield from self._close("completed" if status == "completed" else "incomplete")
        self._response |= {name: response[name] for name in _OF_THE_END}
        if status != "cancelled":
            yield self._lifecycle(status)
        if status == "failed":
            yield response_error(response["error"], self._next_number())

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


def replayed(response: Mapping[str, Any]) -> Iterable[Event]:
    """The events of a background response that has ended, with the same numbers as before."""
    identity = Identity(str(response["id"]).removeprefix(PREFIX), response["created_at"])
    return BackgroundTurn(response, identity).repeat(response)


def _pieces(part: Reasoning | Text | Refusal) -> Iterator[Reasoning | Text | Refusal]:
    """A part in pieces, of which each makes few events."""
    if isinstance(part, Text) and part.logprobs:
        yield from _tokens(part)
    else:
        for start in range(0, len(part.text), PIECE_CHARACTERS):
            yield type(part)(part.text[start : start + PIECE_CHARACTERS])


def _tokens(part: Text) -> list[Text]:
    """A text token by token; in one piece if the tokens do not add up to it, as when one has a part of a character."""
    tokens = [token.get("token") for token in part.logprobs]
    if "".join(token for token in tokens if isinstance(token, str)) != part.text:
        return [part]
    return [Text(str(token.get("token")), (token,)) for token in part.logprobs]


def _parts(item: Json) -> Iterator[Reasoning | Text | Refusal]:
    """The texts of a message or a reasoning item."""
    for content in (*(item.get("summary") or ()), *(item.get("content") or ())):
        match content["type"]:
            case "output_text":
                yield Text(content["text"], tuple(content["logprobs"]))
            case "refusal":
                yield Refusal(content["refusal"])
            case "reasoning_text" | "summary_text":
                yield Reasoning(content["text"])
