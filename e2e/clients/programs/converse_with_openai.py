"""A conversation with OpenAI's SDK: Responses with the history sent or stored, and chat completions."""

from __future__ import annotations

from typing import Any

import openai
from conversation import KIND, MAX_STEPS, MODEL, PICTURE_URL, SCHEMAS, SUMMARY, converse, used
from program import KEY, V1

CLIENT = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
FUNCTIONS: Any = [{"type": "function", "name": n, "parameters": s, "strict": False} for n, s in SCHEMAS.items()]
TOOLS: Any = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
SHOWN = [{"type": "input_image", "image_url": PICTURE_URL}]
SHOWN_IN_CHAT = [{"type": "image_url", "image_url": {"url": PICTURE_URL}}]
REASONING: Any = {"effort": "high", "summary": "auto"}
ENDS = ("response.completed", "response.incomplete")
INCLUDE: Any = ["reasoning.encrypted_content"]


def results(response: Any) -> list[Any]:
    """The results of a response's calls."""
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": used(call.name, call.arguments, SHOWN)}
        for call in calls
    ]


def sent(history: list[Any], prompt: str) -> tuple[list[Any], str]:
    """A turn of streamed responses whose whole input is sent each time."""
    history = [*history, {"role": "user", "content": prompt}]
    for _ in range(MAX_STEPS):
        with CLIENT.responses.stream(
            model=MODEL, input=history, tools=FUNCTIONS, store=False, include=INCLUDE, reasoning=REASONING
        ) as stream:
            # `get_final_response` raises where an answer is cut at the limit.
            response: Any = [event for event in stream if event.type in ENDS][-1].response  # type: ignore[union-attr]
        kept = {"mode": "json", "exclude_none": True, "exclude": {"parsed_arguments"}}
        history += [item.model_dump(**kept) for item in response.output]
        if not (made := results(response)):
            return history, response.output_text
        history += made
    raise AssertionError("no end")


def stored(history: dict[str, Any], prompt: str) -> tuple[dict[str, Any], str]:
    """A turn of responses that name the one before."""
    asked: list[Any] = [*history.get("summary", ()), {"role": "user", "content": prompt}]
    before = history.get("before", openai.omit)
    for _ in range(MAX_STEPS):
        response: Any = CLIENT.responses.create(
            model=MODEL, input=asked, tools=FUNCTIONS, previous_response_id=before, reasoning=REASONING
        )
        before = response.id
        if not (asked := results(response)):
            return {"before": before}, response.output_text
    raise AssertionError("no end")


def chat(history: list[Any], prompt: str) -> tuple[list[Any], str]:
    """A turn of chat completions."""
    history = [*history, {"role": "user", "content": prompt}]
    for _ in range(MAX_STEPS):
        answer = CLIENT.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
        message = answer.choices[0].message
        history.append(message.model_dump(mode="json", exclude_none=True))
        if not message.tool_calls:
            return history, message.content or ""
        history += [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": used(call.function.name, call.function.arguments, SHOWN_IN_CHAT),
            }
            for call in message.tool_calls
            if call.type == "function"
        ]
    raise AssertionError("no end")


SUMMED_UP = {"role": "user", "content": SUMMARY}
if KIND == "stored":
    converse(stored, {}, {"summary": [SUMMED_UP]})
else:
    converse({"sent": sent, "chat": chat}[KIND], [], [SUMMED_UP])
