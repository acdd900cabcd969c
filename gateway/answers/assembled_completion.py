"""Turns the events of a stream into a whole completion, and a whole completion into events.

Clients get the form that they asked for, whichever the engine has sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from io import StringIO
from typing import Any, ClassVar, Final, Protocol

import msgspec

Fields = dict[str, msgspec.Raw]
NULL = msgspec.Raw(b"null")
_FIELDS = msgspec.json.Decoder(Fields)
_OBJECTS = msgspec.json.Decoder(list[Fields])
_TEXT = msgspec.json.Decoder(str)
_INDEX = msgspec.json.Decoder(int)
_EVENT = msgspec.json.Decoder(Fields)
_OF_CHUNK = b'.chunk"'
_EMPTY_TEXT = msgspec.Raw(b'""')
_NONE = (NULL, msgspec.Raw(b"[]"))
_LABELS = frozenset(("role", "id", "type", "name"))
"""Texts of a message that are never split over events, but may be repeated in each."""


class Value(Protocol):
    """A JSON value that is merged from parts, as the fields of a stream's events are.

    A part is raw JSON that is not null. It is decoded only as far as the merge needs, so numbers stay as written.
    """

    def add(self, raw: msgspec.Raw) -> None:
        """Merge the next part. Raises `ValueError` or `msgspec.DecodeError` if it is not of the value's kind."""

    def json(self) -> msgspec.Raw: ...


LATEST: Final = b""
"""The initial value of a field that is not merged: each part replaces the one before."""

Kind = Callable[[str, bytes], "Value | bytes"]
"""Chooses how a field is merged, by its name and its first raw part: returns an empty `Value`, or `LATEST`."""


class Text:
    """A text that is concatenated."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = StringIO()

    def add(self, raw: msgspec.Raw) -> None:
        self._text.write(_TEXT.decode(raw))

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(self._text.getvalue()))


class Items:
    """A list that is concatenated. Its items are not decoded."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, raw: msgspec.Raw) -> None:
        written = bytes(raw)
        if not written.startswith(b"["):
            raise ValueError("a list goes on as something else")
        piece = written[1:-1].strip()
        if piece:
            self._pieces.append(piece)

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b"[%b]" % b",".join(self._pieces))


class Object:
    """An object whose fields are merged one by one. `renamed` maps names in the parts to names in the result."""

    __slots__ = ("_kind", "fields")

    renamed: ClassVar[Mapping[str, str]] = {}

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.fields: dict[str, Value | bytes | None] = {}

    def add(self, raw: msgspec.Raw) -> None:
        self.merge(_FIELDS.decode(raw))

    def merge(self, fields: Fields) -> None:
        """As `add`, for decoded fields. A field is null only if all of its parts are."""
        own, renamed = self.fields, self.renamed
        for given, raw in fields.items():
            name = renamed.get(given, given)
            value = own.setdefault(name, None)
            if raw == NULL:
                continue
            if value is None:
                value = own[name] = self._kind(name, bytes(raw))
            if isinstance(value, bytes):
                own[name] = bytes(raw)
            else:
                value.add(raw)

    def items(self) -> Fields:
        items: Fields = {}
        for name, value in self.fields.items():
            if value is None:
                items[name] = NULL
            else:
                items[name] = msgspec.Raw(value) if isinstance(value, bytes) else value.json()
        return items

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(self.items()))


class Objects:
    """A list of objects, each of which is merged from parts. A part's `index` names its object."""

    __slots__ = ("_by_index", "_keeps_index", "_make")

    def __init__(self, make: Callable[[], Object], *, keeps_index: bool) -> None:
        self._make = make
        self._keeps_index = keeps_index
        self._by_index: dict[int, Object] = {}

    def add(self, raw: msgspec.Raw) -> None:
        """Merge parts of objects. The index of a part without one is its place in `raw`."""
        for place, fields in enumerate(_OBJECTS.decode(raw)):
            index = _INDEX.decode(fields["index"]) if "index" in fields else place
            if not self._keeps_index:
                fields.pop("index", None)
            one = self._by_index.get(index)
            if one is None:
                one = self._by_index[index] = self._make()
            one.merge(fields)

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode([one.items() for _, one in sorted(self._by_index.items())]))


class AssembledCompletion:
    """Joins the events of one stream.

    Texts and tool arguments are joined, lists such as log probabilities are concatenated, and every other field has its
    latest value that is not null. Fields that engines send only in whole answers are missing.
    """

    def __init__(self) -> None:
        self._body = Object(_latest)  # without the choices
        self._choices: Objects | None = None
        self._last: Fields = {}

    def feed(self, events: bytes) -> None:
        """Merge whole events. Raises `ValueError` if one is no event of a completion."""
        try:
            if not events.isascii():
                events.decode()
            for line in events.splitlines():
                data = line.removeprefix(b"data:").strip()
                if data and len(data) < len(line) and data != b"[DONE]":
                    self._add(data)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"no event of a completion: {error}") from error

    def json(self) -> bytes:
        fields = self._body.items()
        if self._choices is not None:
            fields["choices"] = self._choices.json()
        return msgspec.json.encode(fields)

    def _add(self, data: bytes) -> None:
        fields = _EVENT.decode(data)
        choices = fields.pop("choices", None)
        if fields != self._last:  # most events differ from the one before in their choices only
            self._last = {name: raw.copy() for name, raw in fields.items()}
            self._merge(fields)
        if choices is not None and choices != NULL:
            self._choices = self._choices or Objects(_AssembledChoice, keeps_index=True)
            self._choices.add(choices)

    def _merge(self, fields: Fields) -> None:
        kind = bytes(fields.get("object", NULL))
        if kind.endswith(_OF_CHUNK):
            fields["object"] = msgspec.Raw(kind[: -len(_OF_CHUNK)] + b'"')
        self._body.merge(fields)


class _AssembledChoice(Object):
    """A choice. Its `delta`s become its `message`."""

    __slots__ = ()

    renamed: ClassVar[Mapping[str, str]] = {"delta": "message"}

    def __init__(self) -> None:
        super().__init__(_of_choice)


class _Message(Object):
    """A chat's message. The content is null if there are tool calls and no text, as in OpenAI's answers."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_of_message)

    def items(self) -> Fields:
        fields = super().items()
        if fields.get("tool_calls", NULL) not in _NONE and fields.get("content") == _EMPTY_TEXT:
            fields["content"] = NULL
        return fields


def _latest(_name: str, _first: bytes) -> bytes:
    return LATEST


def _of_choice(name: str, first: bytes) -> Value | bytes:
    if name == "message":
        return _Message()
    if name == "logprobs":
        return Object(_list_or_latest)
    return Text() if name == "text" else _list_or_latest(name, first)


def _of_message(name: str, first: bytes) -> Value | bytes:
    if name == "tool_calls":
        return Objects(partial(Object, _of_tool_call), keeps_index=False)
    return _of_tool_call(name, first)


def _of_tool_call(name: str, first: bytes) -> Value | bytes:
    return Object(_text_or_list) if first.startswith(b"{") else _text_or_list(name, first)


def _text_or_list(name: str, first: bytes) -> Value | bytes:
    return Text() if first.startswith(b'"') and name not in _LABELS else _list_or_latest(name, first)


def _list_or_latest(_name: str, first: bytes) -> Value | bytes:
    return Items() if first.startswith(b"[") else LATEST


def events_of_whole(answer: bytes | bytearray, *, withhold: bool) -> bytes:
    """The events of a stream for a whole completion: its choices, their ends, its usage unless `withhold`, `[DONE]`."""
    body = msgspec.json.decode(answer)
    usage, choices = body.pop("usage", None), [_begun_and_ended(choice) for choice in _indexed(body.pop("choices"))]
    if body.get("object") == "chat.completion":
        body["object"] = "chat.completion.chunk"
    chunks: list[dict[str, Any]] = [{"choices": list(part)} for part in zip(*choices, strict=True)]
    if usage is not None and not withhold:
        chunks.append({"choices": [], "usage": usage})
    events = [b"data: %b\n\n" % msgspec.json.encode({**body, **chunk}) for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])


def _begun_and_ended(choice: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A choice's two parts in a stream. An answer that came as a whole has ended, also without a finish reason."""
    end = {"index": choice["index"], "finish_reason": choice.get("finish_reason") or "stop"}
    begun, message = {**choice, "finish_reason": None}, choice.get("message")
    if not isinstance(message, dict):
        return begun, {**end, "text": ""}
    del begun["message"]
    calls = _indexed(message.get("tool_calls"))
    begun["delta"] = {**message, "tool_calls": calls} if calls else message
    return begun, {**end, "delta": {}}


def _indexed(objects: object) -> list[dict[str, Any]]:
    given = objects if isinstance(objects, list) else []
    return [{"index": place, **one} for place, one in enumerate(given) if isinstance(one, dict)]
