"""OpenAI's SDK for Python, whose calls wait for long: all its settings are the defaults."""

from __future__ import annotations

from typing import Any

from openai import OpenAI
from program import KEY, MODEL, V1, feature, run_at_once

QUESTION = "Where is the Eiffel Tower?"

client = OpenAI(base_url=V1, api_key=KEY)
chat: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 8,
}


@feature("whole")
def whole() -> None:
    assert client.chat.completions.create(**chat).choices[0].message.content


@feature("stream")
def stream() -> None:
    chunks = client.chat.completions.create(**chat, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices])


run_at_once()
