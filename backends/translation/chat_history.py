"""Puts a chat's history into the order that all templates accept: one system message first, results after calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

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


def ordered(messages: list[Json]) -> list[Json]:
    """The messages, with the leading system messages joined into one, and each result after its call.

    Many templates refuse a later system message. It becomes a part of the user's turn at its place instead of moving to
    the front, so that the prefix before it stays cached.
    """
    begin = next((at for at, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    turns: list[list[Json]] = []
    caller: dict[str, list[Json]] = {}
    joined: list[tuple[Json, list[Any]]] = []  # messages of users, and the contents that each is made of
    reminds = False  # whether the last turn ends with what the system said
    for message in messages[begin:]:
        role = message["role"]
        if role == "tool" and message["tool_call_id"] in caller:
            caller[message["tool_call_id"]].append(message)
            continue
        follows_user, reminded = bool(turns) and turns[-1][-1]["role"] == "user", reminds
        reminds = role in SYSTEM_ROLES
        if reminds:
            message = {"role": "user", "content": _reminder(message["content"])}  # noqa: PLW2901
        if follows_user and (reminds or (reminded and role == "user")):
            last = turns[-1][-1]
            if not joined or joined[-1][0] is not last:
                last = turns[-1][-1] = {**last}
                joined.append((last, [last["content"]]))
            joined[-1][1].append(message["content"])
            continue
        turns.append([message])
        if "tool_calls" in message:
            caller |= {call["id"]: turns[-1] for call in message["tool_calls"]}
    for message, contents in joined:
        message["content"] = _joined(contents)
    return [*_one_system(messages[:begin]), *(message for turn in turns for message in turn)]


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
