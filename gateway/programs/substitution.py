"""Semantic variables in prompts: `{{name}}` becomes the variable's text if the name has a value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.backends.tokenization.chat_messages import TEXT_KEYS
from plait.gateway.calls.names import VARIABLE_NAME
from plait.gateway.calls.outgoing import Fields

PLACEHOLDER = re.compile(rf"\{{\{{\s*({VARIABLE_NAME})\s*\}}\}}")


def fill_in(
    fields: Fields, request: ChatRequest | CompletionRequest, values: Mapping[str, str]
) -> ChatRequest | CompletionRequest:
    """The request with `values` filled into its messages or its prompt, also in the `fields` of its body.

    Every other field stays as the client wrote it. Placeholders inside a value are not replaced.
    """
    if not values:
        return request
    name, filled = (
        ("messages", [filled_message(message, values) for message in request.messages])
        if isinstance(request, ChatRequest)
        else ("prompt", _texts(request.prompt, values))
    )
    fields[name] = msgspec.Raw(msgspec.json.encode(filled))
    return msgspec.structs.replace(request, **{name: filled})


def replaced(text: str, values: Mapping[str, str]) -> str:
    """A text with its placeholders replaced. Placeholders of other names stay."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text) if "{{" in text else text


def filled_message(message: Mapping[str, Any], values: Mapping[str, str]) -> Mapping[str, Any]:
    """A chat message with its placeholders replaced: in its content, or in the texts among the content's parts."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [_part(part, values) for part in content]}
    return {**message, "content": replaced(content, values)} if isinstance(content, str) else message


def message_texts(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a chat's message that `filled_message` replaces."""
    content = message.get("content")
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        key = _text_key(part)
        if key is not None or isinstance(part, str):
            yield part if key is None else part[key]


def _part(part: Any, values: Mapping[str, str]) -> Any:
    if isinstance(part, str):
        return replaced(part, values)
    key = _text_key(part)
    return part if key is None else {**part, key: replaced(part[key], values)}


def _text_key(part: Any) -> str | None:
    """The key that holds a part's text; None for a part that is not text."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    key = TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    return key if key is not None and isinstance(part.get(key), str) else None


def _texts(prompt: Any, values: Mapping[str, str]) -> Any:
    """One prompt or several, filled. Token ids stay as they are."""
    if isinstance(prompt, list):
        return [_texts(item, values) if isinstance(item, str) else item for item in prompt]
    return replaced(prompt, values) if isinstance(prompt, str) else prompt
