"""Anthropic's SDK for Python, whose streams are silent for long."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from program import KEY, URL, run_at_once
from silent import MESSAGES, reads_silent_streams

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)


@reads_silent_streams
def message(model: str, more: dict[str, Any]) -> str:
    events = client.messages.create(model=model, messages=MESSAGES, max_tokens=64, stream=True, extra_body=more)
    return "".join([event.delta.text for event in events if event.type == "content_block_delta"])


@reads_silent_streams
def message_helper(model: str, more: dict[str, Any]) -> str:
    with client.messages.stream(model=model, messages=MESSAGES, max_tokens=64, extra_body=more) as events:
        said = "".join(events.text_stream)
        assert events.get_final_message().stop_reason == "end_turn"
    return said


run_at_once()
