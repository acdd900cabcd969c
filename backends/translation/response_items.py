"""The input items of `/v1/responses`, as the messages of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plait.backends.translation.fields import (
    Json,
    a_list,
    a_text,
    objects,
    one_or_parts,
    unsupported,
    without_nones,
    wrong,
)

ROLES = frozenset({"user", "assistant", "system", "developer"})


def messages_of(value: object) -> list[Json]:
    """The messages for `input`, a text or a list of items. Raises CallerError.

    What the assistant said and called in a row is one message, as chat completions have it.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input", "must be a text or a non-empty list of items")
    messages = _Messages()
    for item, where in objects(value, "input"):
        messages.add(item, where)
    return messages.messages


class _Messages:
    """The messages so far. `_thought` waits for the message or the call that it led to."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._thought = ""

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._thought = ""
            call_id = a_text(item.get("call_id"), f"{where}.call_id")
            content = _content(item.get("output"), f"{where}.output")
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "reasoning":
            self._thought += _thought(item, where)
        elif kind == "item_reference":
            raise unsupported(where, "a reference to a stored item")
        else:
            raise unsupported(where, f"an item of type {kind!r}")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise wrong(f"{where}.role", f"must be one of {', '.join(sorted(ROLES))}")
        message = {"role": role, "content": _content(item.get("content"), f"{where}.content")}
        if role == "assistant":
            self._think(message)
        self._thought = ""
        self.messages.append(message)

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or self._thought:
            last = {"role": "assistant", "content": None}
            self._think(last)
            self.messages.append(last)
        function = {key: a_text(item.get(key), f"{where}.{key}") for key in ("name", "arguments")}
        call_id = a_text(item.get("call_id"), f"{where}.call_id")
        last.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _think(self, message: Json) -> None:
        if self._thought:
            message["reasoning_content"] = self._thought
        self._thought = ""


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item; none if it is encrypted."""
    return "".join(
        a_text(part.get("text"), f"{place}.text") for part, place in objects(item.get("content"), f"{where}.content")
    )


def _content(content: object, where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    a_list(content, where)
    return one_or_parts([part for item, place in objects(content, where) for part in _parts(item, place)])


def _parts(part: Mapping[str, Any], where: str) -> Iterator[Json]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        yield {"type": "text", "text": a_text(part.get("text"), f"{where}.text")}
    elif kind == "refusal":
        yield {"type": "refusal", "refusal": a_text(part.get("refusal"), f"{where}.refusal")}
    elif kind == "input_image":
        if part.get("image_url") is None:
            raise unsupported(where, "an image by 'file_id'; send its 'image_url'")
        url = a_text(part["image_url"], f"{where}.image_url")
        yield {"type": "image_url", "image_url": without_nones(url=url, detail=part.get("detail"))}
    elif kind == "input_audio":
        yield {"type": "input_audio", "input_audio": part.get("input_audio")}
    else:
        raise unsupported(where, f"a part of type {kind!r}")
