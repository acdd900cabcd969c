"""The text in a message's content, whatever its form: engines and clients differ in it."""

from __future__ import annotations

from typing import Final

import msgspec

_THOUGHTS: Final = ("thinking", "reasoning", "reasoning_text")
_TEXT_KEYS: Final = ("text", "thinking", "reasoning", "refusal", "content", "summary")


def content_text(content: object) -> str:
    """The text of a message's content, without parts of thinking."""
    return text_of([part for part in content if not is_thought(part)] if isinstance(content, list) else content)


def is_thought(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in _THOUGHTS


def text_of(value: object) -> str:
    """The text in a value, whatever its type.

    A string is the text itself. A list gives the joined texts of its items. An object gives the text under the first of
    `_TEXT_KEYS` that has a value. If no key has a value, an object with a `type` gives no text. None gives no text. Any
    other value gives its JSON.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list):
        return "".join(map(text_of, value))
    if isinstance(value, dict):
        key = next((key for key in _TEXT_KEYS if value.get(key)), None)
        if key is not None or "type" in value:
            return text_of(value.get(key)) if key else ""
    return msgspec.json.encode(value).decode()
