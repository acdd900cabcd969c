"""Answers of chat completions to translate, whole and as the events that bring the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 7,
    "total_tokens": 27,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def message(
    content: str | None = None, *, reasoning: str | None = None, refusal: str | None = None, calls: Iterable[Any] = ()
) -> dict[str, Any]:
    """A message; `calls` are pairs of a name and arguments."""
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        made["reasoning_content"] = reasoning
    if refusal:
        made["refusal"] = refusal
    if calls:
        made["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return made


def whole(said: dict[str, Any], finish_reason: str = "stop", usage: Any = USAGE, **choice: Any) -> bytes:
    """A `chat.completion`."""
    choices = [{"index": 0, "message": said, "finish_reason": finish_reason, **choice}]
    return json.dumps(
        {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": choices, "usage": usage}
    ).encode()


def stream(
    said: dict[str, Any], finish_reason: str = "stop", usage: Any = USAGE, size: int = 3, **choice: Any
) -> list[bytes]:
    """The events of a stream that says the same, in pieces of `size` characters."""
    deltas = [{"role": "assistant", "content": ""}, *_deltas(said, size)]
    events = [chunk([{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
    events.append(chunk([{"index": 0, "delta": {}, "finish_reason": finish_reason, **choice}]))
    if usage is not None:
        events.append(chunk([], usage=usage))
    return [*events, b"data: [DONE]\n\n"]


def error(text: str = "it broke") -> bytes:
    """An error event."""
    return (
        b"data: "
        + json.dumps({"error": {"message": text, "type": "engine_error", "code": "engine_broken"}}).encode()
        + b"\n\n"
    )


def _deltas(said: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    for key in ("reasoning_content", "content", "refusal"):
        text = said.get(key) or ""
        yield from ({key: text[at : at + size]} for at in range(0, len(text), size))
    for index, call in enumerate(said.get("tool_calls", ())):
        function = call["function"]
        yield {"tool_calls": [{**call, "index": index, "function": {"name": function["name"], "arguments": ""}}]}
        text = function["arguments"]
        for at in range(0, len(text), size):
            yield {"tool_calls": [{"index": index, "function": {"arguments": text[at : at + size]}}]}


def chunk(choices: list[Any], **more: Any) -> bytes:
    """The event of one chunk."""
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"
