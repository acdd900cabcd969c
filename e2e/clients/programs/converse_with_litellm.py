"""A conversation with LiteLLM: chat completions as such, and over its bridges to Responses and Messages."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet at its import

import litellm
from conversation import KIND, MAX_STEPS, MAX_TOKENS, MODEL, PICTURE_URL, SCHEMAS, SUMMARY, converse, used
from program import KEY, URL, V1

TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
SHOWN = [{"type": "image_url", "image_url": {"url": PICTURE_URL}}]
ASKED: dict[str, Any] = {
    "chat": {"model": f"hosted_vllm/{MODEL}", "api_base": V1},
    "stored": {"model": f"openai/responses/{MODEL}", "api_base": V1, "reasoning_effort": "high"},
    "sent": {
        "model": f"openai/responses/{MODEL}",
        "api_base": V1,
        "reasoning_effort": "high",
        "include": ["reasoning.encrypted_content"],
        "store": False,
    },
    "anthropic": {
        "model": f"anthropic/{MODEL}",
        "api_base": URL,
        "max_tokens": MAX_TOKENS,
        "thinking": {"type": "enabled", "budget_tokens": 1_024},
        "allowed_openai_params": ["thinking"],  # it knows which of Anthropic's own models take them
    },
}[KIND]


def turn(history: list[Any], prompt: str) -> tuple[list[Any], str]:
    """A turn whose messages are sent each time."""
    history = [*history, {"role": "user", "content": prompt}]
    for _ in range(MAX_STEPS):
        answer: Any = litellm.completion(messages=history, tools=TOOLS, api_key=KEY, num_retries=0, **ASKED)
        message = answer.choices[0].message
        history.append(message.model_dump(mode="json", exclude_none=True))
        if not message.tool_calls:
            return history, message.content or ""
        history += [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": used(call.function.name, call.function.arguments, SHOWN),
            }
            for call in message.tool_calls
        ]
    raise AssertionError("no end")


converse(turn, [], [{"role": "user", "content": SUMMARY}])
