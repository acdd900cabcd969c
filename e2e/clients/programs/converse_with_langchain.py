"""A conversation with LangChain: over chat completions, Responses with and without `store`, and Messages."""

from __future__ import annotations

from typing import Any

from conversation import KIND, MAX_STEPS, MAX_TOKENS, MODEL, PICTURE, SUMMARY, converse, shell
from langchain_core.load import dumpd, load
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from program import KEY, URL, V1
from pydantic import ValidationError

SHOWN: Any = [{"type": "image", "base64": PICTURE, "mime_type": "image/png"}]


@tool
def bash(command: str) -> str:
    """Run a command."""
    return shell(command)


@tool
def look(place: str) -> Any:
    """Show a place."""
    return SHOWN


def model() -> Any:
    """The client of this kind, without its tools."""
    if KIND == "anthropic":
        from langchain_anthropic import ChatAnthropic  # noqa: PLC0415 -- takes half a second

        thinking = {"type": "enabled", "budget_tokens": 2_000}
        return ChatAnthropic(
            model=MODEL,
            base_url=URL,
            api_key=KEY,
            max_tokens=MAX_TOKENS,
            thinking=thinking,
            streaming=True,
            max_retries=0,
        )
    from langchain_openai import ChatOpenAI  # noqa: PLC0415 -- takes half a second

    asked: dict[str, Any] = {}
    if KIND != "chat":
        asked = {"use_responses_api": True, "output_version": "responses/v1", "store": KIND == "stored"}
        asked |= {"reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    return ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, max_retries=0, streaming=KIND == "sent", **asked)


ASKED = model().bind_tools([bash, look])
TOOLS = {"bash": bash, "look": look}


def used(call: Any) -> Any:
    """The result of a call. Arguments that the model got wrong are its result."""
    try:
        return TOOLS[call["name"]].invoke({**call, "type": "tool_call"})
    except ValidationError as error:
        return ToolMessage(f"These are no arguments: {error}", tool_call_id=call["id"], status="error")


def turn(history: list[Any], prompt: str) -> tuple[list[Any], str]:
    """A turn whose messages are sent each time."""
    messages = [*(load(one, allowed_objects="messages") for one in history), HumanMessage(prompt)]
    for _ in range(MAX_STEPS):
        answer = ASKED.invoke(messages)
        messages.append(answer)
        messages += [used(call) for call in answer.tool_calls]
        messages += [
            ToolMessage("These are no arguments.", tool_call_id=call["id"]) for call in answer.invalid_tool_calls
        ]
        if not (answer.tool_calls or answer.invalid_tool_calls):
            return [dumpd(one) for one in messages], answer.text
    raise AssertionError("no end")


converse(turn, [], [dumpd(HumanMessage(SUMMARY))])
