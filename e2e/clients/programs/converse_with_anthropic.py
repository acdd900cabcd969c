"""A conversation with Anthropic's SDK, streamed and whole."""

from __future__ import annotations

from typing import Any

import anthropic
from conversation import KIND, MAX_STEPS, MAX_TOKENS, MODEL, PICTURE, SCHEMAS, SUMMARY, converse, used
from program import KEY, URL

CLIENT = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOLS: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
SHOWN = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}]


def turn(history: list[Any], prompt: str) -> tuple[list[Any], str]:
    """A turn whose messages are sent each time."""
    history = [*history, {"role": "user", "content": prompt}]
    for _ in range(MAX_STEPS):
        asked: Any = {
            "model": MODEL,
            "max_tokens": MAX_TOKENS,
            "messages": history,
            "tools": TOOLS,
            "thinking": {"type": "enabled", "budget_tokens": 2_000},
        }
        if KIND == "stream":
            with CLIENT.messages.stream(**asked) as stream:
                message: Any = stream.get_final_message()
        else:
            message = CLIENT.messages.create(**asked)
        content = [
            block.model_dump(mode="json", exclude_none=True, exclude={"parsed_output"}) for block in message.content
        ]
        history.append({"role": "assistant", "content": content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return history, "".join(block.text for block in message.content if block.type == "text")
        made = [
            {"type": "tool_result", "tool_use_id": call.id, "content": used(call.name, call.input, SHOWN)}
            for call in calls
        ]
        history.append({"role": "user", "content": made})
    raise AssertionError("no end")


converse(turn, [], [{"role": "user", "content": SUMMARY}])
