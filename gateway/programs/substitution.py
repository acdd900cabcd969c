"""Semantic variables in prompts: `{{name}}` becomes the variable's text if the name has a value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.backends.tokenization.chat_messages import TEXT_KEYS
from plait.gateway.calls.annotations import VARIABLE_NAME
from plait.gateway.calls.outgoing import Fields
from plait.gateway.programs.growing_text import utf8_bytes

PLACEHOLDER = re.compile(rf"\{{\{{\s*({VARIABLE_NAME})\s*\}}\}}")
NOWHERE: Final[Mapping[int, int]] = {}


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


def filled_sizes(request: ChatRequest | CompletionRequest, values: Mapping[str, str]) -> list[int]:
    """The bytes of text in each prompt that `fill_in` makes; none without `values`.

    It takes as long as to read the request's own texts.
    """
    if not values:
        return []
    sizes = sizes_of(values)
    if isinstance(request, ChatRequest):
        return [sum(filled_bytes(text, sizes) for message in request.messages for text in message_texts(message))]
    prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    return [filled_bytes(prompt, sizes) for prompt in prompts if isinstance(prompt, str)]


def sizes_of(values: Mapping[str, str]) -> dict[str, int]:
    """The bytes of each value."""
    return {name: utf8_bytes(value) for name, value in values.items()}


def filled_bytes(text: str, sizes: Mapping[str, int], at: Mapping[int, int] = NOWHERE) -> int:
    """The bytes of a text whose placeholders are replaced by values of these `sizes`, by name.

    A placeholder that begins `at` a position is replaced by a text of that size instead.
    """
    total = utf8_bytes(text)
    if "{{" in text:
        for match in PLACEHOLDER.finditer(text):
            size = at.get(match.start(), sizes.get(match[1]))
            if size is not None:
                total += size - utf8_bytes(match[0])
    return total


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
