"""Anthropic's SDK for Python, whose calls wait for long: all its settings are the defaults."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from program import KEY, MODEL, URL, feature, run_at_once

QUESTION = "Where is the Eiffel Tower?"

client = Anthropic(base_url=URL, api_key=KEY)
asked: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 8,
}


@feature("whole")
def whole() -> None:
    assert client.messages.create(**asked).content


@feature("stream")
def stream() -> None:
    with client.messages.stream(**asked) as events:
        assert events.get_final_text()


run_at_once()
