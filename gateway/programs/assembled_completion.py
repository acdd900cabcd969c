"""A whole completion, assembled from the events of a stream: what the engine would have answered without a stream.

Pure: events in, a JSON object out. Texts and tool arguments are joined, lists such as log probabilities are
concatenated, and every other field has its latest value that is not null. Fields that engines send only in whole
answers are missing.
"""

from __future__ import annotations

from functools import partial

import msgspec

from plait.gateway.programs.json_parts import NULL, Fields, Items, Latest, Object, Objects, Text, Value

_EVENT = msgspec.json.Decoder(Fields)
_OF_CHUNK = b'.chunk"'
_EMPTY_TEXT = msgspec.Raw(b'""')
_NONE = (NULL, msgspec.Raw(b"[]"))
_LABELS = frozenset(("role", "id", "type", "name"))
"""Texts of a message that come whole: engines may repeat them."""


class AssembledCompletion:
    """One completion. `size_bytes` is about the memory that it takes."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._body = Object(_latest)  # without the choices
        self._choices: Objects | None = None
        self._last: Fields = {}

    def feed(self, events: bytes) -> None:
        """Whole events come. Raises `ValueError` if one is no event of a completion."""
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
        """The completion so far."""
        fields = self._body.items()
        if self._choices is not None:
            fields["choices"] = self._choices.json()
        return msgspec.json.encode(fields)

    @property
    def error(self) -> object:
        """The error that came as an event; None if there is none."""
        value = self._body.fields.get("error")
        return None if value is None else msgspec.json.decode(value.json())

    def _add(self, data: bytes) -> None:
        fields = _EVENT.decode(data)
        choices = fields.pop("choices", None)
        if fields != self._last:  # most events differ from the one before in their choices only
            self._last = {name: raw.copy() for name, raw in fields.items()}
            self._merge(fields)
        if choices is not None and choices != NULL:
            self._choices = self._choices or Objects(_Choice, keeps_index=True)
            self.size_bytes += self._choices.add(choices)

    def _merge(self, fields: Fields) -> None:
        kind = bytes(fields.get("object", NULL))
        if kind.endswith(_OF_CHUNK):
            fields["object"] = msgspec.Raw(kind[: -len(_OF_CHUNK)] + b'"')
        self.size_bytes += self._body.merge(fields)


class _Choice(Object):
    """A choice. The deltas of a chat's message become the message."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_of_choice)

    def merge(self, fields: Fields) -> int:
        """Fields come."""
        if "delta" in fields:
            fields = {"message" if name == "delta" else name: raw for name, raw in fields.items()}
        return super().merge(fields)


class _Message(Object):
    """A chat's message. Its content is null if it has tool calls and no text, as in OpenAI's answers."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_of_message)

    def items(self) -> Fields:
        """The fields so far."""
        fields = super().items()
        if fields.get("tool_calls", NULL) not in _NONE and fields.get("content") == _EMPTY_TEXT:
            fields["content"] = NULL
        return fields


def _latest(_name: str, _first: bytes) -> Value:
    return Latest()


def _of_choice(name: str, first: bytes) -> Value:
    if name == "message":
        return _Message()
    if name == "logprobs":
        return Object(_list_or_latest)
    return Text() if name == "text" else _list_or_latest(name, first)


def _of_message(name: str, first: bytes) -> Value:
    if name == "tool_calls":
        return Objects(partial(Object, _of_tool_call), keeps_index=False)
    return _of_tool_call(name, first)


def _of_tool_call(name: str, first: bytes) -> Value:
    return Object(_text_or_list) if first.startswith(b"{") else _text_or_list(name, first)


def _text_or_list(name: str, first: bytes) -> Value:
    return Text() if first.startswith(b'"') and name not in _LABELS else _list_or_latest(name, first)


def _list_or_latest(_name: str, first: bytes) -> Value:
    return Items() if first.startswith(b"[") else Latest()
