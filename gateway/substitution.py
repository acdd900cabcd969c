"""Semantic variables in prompts: `{{name}}` becomes the variable's text, where the name is one that may be replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from backends.chat_messages import TEXT_KEYS
from backends.openai_protocol import ChatRequest, CompletionRequest

PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]{0,63})\s*\}\}")


def fill_in(
    body: bytes, request: ChatRequest | CompletionRequest, values: Mapping[str, str]
) -> tuple[bytes, ChatRequest | CompletionRequest]:
    """A request's body and the request itself with `values` in the contents of its messages, or in its prompt.

    Every other field stays as it was written, and what a value holds is not looked into again.
    """
    if not values:
        return body, request
    name, filled = (
        ("messages", [_message(message, values) for message in request.messages])
        if isinstance(request, ChatRequest)
        else ("prompt", _texts(request.prompt, values))
    )
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields[name] = msgspec.Raw(msgspec.json.encode(filled))
    return msgspec.json.encode(fields), msgspec.structs.replace(request, **{name: filled})


def replaced(text: str, values: Mapping[str, str]) -> str:
    """A text with its placeholders replaced; those of other names stay."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text) if "{{" in text else text


def _message(message: Any, values: Mapping[str, str]) -> Any:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [_part(part, values) for part in content]}
    return {**message, "content": replaced(content, values)} if isinstance(content, str) else message


def _part(part: Any, values: Mapping[str, str]) -> Any:
    if isinstance(part, str):
        return replaced(part, values)
    kind = part.get("type", "text") if isinstance(part, dict) else None
    key = TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None or not isinstance(part.get(key), str):
        return part
    return {**part, key: replaced(part[key], values)}


def _texts(prompt: Any, values: Mapping[str, str]) -> Any:
    """A prompt, or several; token ids are no text."""
    if isinstance(prompt, list):
        return [_texts(item, values) if isinstance(item, str) else item for item in prompt]
    return replaced(prompt, values) if isinstance(prompt, str) else prompt
