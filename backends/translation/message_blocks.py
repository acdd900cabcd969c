"""The messages of `/v1/messages`, made of content blocks, as the messages of chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from plait.backends.translation.fields import (
    Json,
    a_text,
    an_object,
    an_object_or_none,
    objects,
    one_or_parts,
    unsupported,
    wrong,
)

# Claude Code begins its system prompt with a block that differs in each call. No call could find another's prompt
# in the engine's cache behind it.
BILLING_LINE: Final = "x-anthropic-billing-header"

Block = tuple[Mapping[str, Any], str]
"""A content block and its place in the body."""


def system_messages(system: object) -> list[Json]:
    """The system prompt, a text or text blocks, as one message; none without a prompt."""
    return _system(system, "system") if system else []


def chat_messages(messages: object) -> list[Json]:
    """The messages for Anthropic's. Raises CallerError for malformed blocks, and for types that have no counterpart."""
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "must be a non-empty list")
    return [chat for message, where in objects(messages, "messages") for chat in _chat(message, where)]


def _chat(message: Mapping[str, Any], where: str) -> list[Json]:
    role, place = message.get("role"), f"{where}.content"
    if role == "user":
        return list(_user(_blocks(message.get("content"), place)))
    if role == "assistant":
        return [_assistant(_blocks(message.get("content"), place))]
    if role == "system":
        return _system(message.get("content"), place)
    raise wrong(f"{where}.role", "must be 'user', 'assistant' or 'system'")


def _blocks(content: object, where: str) -> list[Block]:
    """The content as blocks; a text is one block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if content is None:
        raise wrong(where, "is missing")
    return list(objects(content, where))


def _system(content: object, where: str) -> list[Json]:
    texts = [_text(block, place) for block, place in _blocks(content, where)]
    text = "\n".join(text for text in texts if text and not text.startswith(BILLING_LINE))
    return [{"role": "system", "content": text}] if text else []


def _user(blocks: Iterable[Block]) -> Iterator[Json]:
    """A message for each tool's result, and one for the rest."""
    parts: list[Json] = []
    results = False
    for block, where in blocks:
        if block.get("type") == "tool_result":
            results = True
            yield _tool_result(block, where)
        else:
            parts.append(_part(block, where))
    if parts or not results:
        yield {"role": "user", "content": one_or_parts(parts)}


def _tool_result(block: Mapping[str, Any], where: str) -> Json:
    content = block.get("content")
    parts = [_part(part, place) for part, place in ([] if content is None else _blocks(content, f"{where}.content"))]
    if block.get("is_error"):  # a `tool` message has no such mark
        parts.insert(0, {"type": "text", "text": "Error:"})
        parts = _joined(parts)
    call_id = a_text(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": call_id, "content": one_or_parts(parts)}


def _joined(parts: list[Json]) -> list[Json]:
    """One text if all parts are texts."""
    if all(part["type"] == "text" for part in parts):
        return [{"type": "text", "text": "\n".join(part["text"] for part in parts)}]
    return parts


def _part(block: Mapping[str, Any], where: str) -> Json:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": _text(block, where)}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(block, f"{where}.source")}}
    raise unsupported(where, f"a block of type {kind!r}")


def _text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise unsupported(where, f"a block of type {block.get('type')!r}")
    return a_text(block.get("text"), f"{where}.text")


def _image_url(block: Mapping[str, Any], where: str) -> str:
    source = an_object(block.get("source"), where)
    kind = source.get("type")
    if kind == "url":
        return a_text(source.get("url"), f"{where}.url")
    if kind == "base64":
        media, data = (a_text(source.get(key), f"{where}.{key}") for key in ("media_type", "data"))
        return f"data:{media};base64,{data}"
    raise unsupported(where, f"an image by {kind!r}")


def _assistant(blocks: Iterable[Block]) -> Json:
    """One message. Thoughts that are redacted are left out, since only Anthropic's models can read them."""
    thought, parts, calls = "", list[Json](), list[Json]()
    for block, where in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thought += a_text(block.get("thinking"), f"{where}.thinking")
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind != "redacted_thinking":
            parts.append({"type": "text", "text": _text(block, where)})
    message: Json = {"role": "assistant", "content": one_or_parts(parts) or (None if calls else "")}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> Json:
    arguments = msgspec.json.encode(an_object_or_none(block.get("input"), f"{where}.input")).decode()
    call_id, name = (a_text(block.get(key), f"{where}.{key}") for key in ("id", "name"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
