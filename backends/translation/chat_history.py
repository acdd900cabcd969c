"""Makes any history one that every engine and template takes.

One system message is first, results stand behind their calls, neighbours of one role are one message, and the arguments
of a call are an object. What a model or a tool has said stays in a conversation for good, so no form of it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import msgspec

from plait.backends.protocol.message_content import content_text
from plait.backends.translation.fields import Json, one_or_parts

SYSTEM_ROLES: Final = ("system", "developer")

NOTE_CHARACTERS: Final = 2_000
"""The longest note to the model in the place of what chat completions cannot express."""

NOTE_LEVELS: Final = 6
"""How deep a value is searched for the text of its note."""

_UNTOLD: Final = frozenset((
    "id", "type", "status", "role", "cache_control", "encrypted_content", "encrypted_stdout", "encrypted_index", "data",
    "file_data", "image_url", "result", "signature", "caller", "created_by", "page_age",
))  # fmt: skip
"""Keys whose values mean nothing to a model."""


def note(kind: object, value: Mapping[str, Any]) -> str:
    """The note for an item or part that chats do not have: its type and its texts."""
    said = _told(value, NOTE_LEVELS)
    text = f": {msgspec.json.encode(said).decode()}" if said else ""
    shown = text if len(text) <= NOTE_CHARACTERS else f"{text[:NOTE_CHARACTERS]}..."
    return f"[{kind}{shown}]"


def _told(value: Any, levels: int) -> Any:
    """The texts in a value, down to `levels`; None in the place of deeper ones."""
    if isinstance(value, Mapping | list) and not levels:
        return None
    if isinstance(value, Mapping):
        told = {key: _told(item, levels - 1) for key, item in value.items() if key not in _UNTOLD}
        return {key: item for key, item in told.items() if item not in (None, "", [], {})}
    return [_told(item, levels - 1) for item in value] if isinstance(value, list) else value


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def arguments_of(given: object) -> str:
    """The JSON object of a call's arguments: engines refuse a history with any other value, or with half of one.

    A text of an object stays as it is. Nothing is an empty object. Any other value becomes the object's only field.
    """
    value = _decoded(given) if isinstance(given, str) else given
    if isinstance(value, str) and value is not given:  # encoded twice
        return arguments_of(value)
    if not value or (isinstance(value, str) and not value.strip()):
        return "{}"
    if isinstance(value, dict):
        return given if isinstance(given, str) else msgspec.json.encode(value).decode()
    return msgspec.json.encode({"arguments": value}).decode()


def content_of(content: object) -> str | list[Json]:
    """The content of an answer or of a tool's result, whatever its type, as a text or as parts."""
    if isinstance(content, dict) and "type" in content:
        content = [content]
    return [_part(part) for part in content] if isinstance(content, list) else content_text(content)


def _part(part: object) -> Json:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return text_part(content_text(part))
    has_text = "text" in part or part["type"].endswith("text")
    return {**part, "text": content_text(part.get("text"))} if has_text else part


def ordered(messages: list[Json]) -> list[Json]:
    """The messages in the order that all templates accept.

    Many templates refuse a later system message. It becomes a part of the user's turn at its place instead of moving to
    the front, so that the prefix before it stays cached. Many refuse two turns of one role in a row, too.
    """
    begin = next((at for at, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    turns: list[list[Json]] = []
    caller: dict[str, list[Json]] = {}
    for message in messages[begin:]:
        if message["role"] == "tool" and message["tool_call_id"] in caller:
            caller[message["tool_call_id"]].append(message)
            continue
        is_system = message["role"] in SYSTEM_ROLES
        turns.append([{"role": "user", "content": _reminder(message["content"])} if is_system else message])
        if "tool_calls" in message:
            caller |= {call["id"]: turns[-1] for call in message["tool_calls"]}
    return [*_one_system(messages[:begin]), *_alternating(message for turn in turns for message in turn)]


def _alternating(messages: Iterable[Json]) -> Iterator[Json]:
    """The messages, with neighbours of one role joined. Each result of a tool stays a message."""
    for role, neighbours in groupby(messages, itemgetter("role")):
        first, *others = neighbours
        if role == "tool" or not others:
            yield from (first, *others)
            continue
        together = [first, *others]
        thoughts = [message["reasoning_content"] for message in together if "reasoning_content" in message]
        calls = [call for message in together for call in message.get("tool_calls", ())]
        content = _joined([message["content"] for message in together]) or first["content"]
        joined = {**first, "content": content}
        if thoughts:
            joined["reasoning_content"] = "\n\n".join(thoughts)
        if calls:
            joined["tool_calls"] = calls
        yield joined


def _one_system(messages: list[Json]) -> list[Json]:
    if not messages:
        return []
    return [{"role": "system", "content": _joined([message["content"] for message in messages])}]


def _reminder(content: Any) -> str | list[Json]:
    if isinstance(content, str):
        return f"<system-reminder>\n{content}\n</system-reminder>"
    return [text_part("<system-reminder>"), *content, text_part("</system-reminder>")]


def _joined(contents: list[Any]) -> str | list[Json]:
    """Several contents as one. A single one stays as it is."""
    if len(contents) == 1:
        only: str | list[Json] = contents[0]
        return only
    said = [content for content in contents if content]
    if all(isinstance(content, str) for content in said):
        return "\n\n".join(said)
    parts = [[text_part(content)] if isinstance(content, str) else content for content in said]
    return one_or_parts([part for one in parts for part in one])


def _decoded(text: str) -> Any:
    """The value of a JSON text; the text itself if it is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text
