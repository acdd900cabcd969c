"""A request to `/v1/responses`, as one to chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from plait.backends.translation.fields import (
    Json,
    a_limit,
    a_list,
    a_text,
    an_object,
    an_object_or_none,
    objects,
    streamed,
    unsupported,
    without_nones,
    wrong,
)
from plait.backends.translation.response_items import messages_of

# What is translated, echoed in the answer, or without a meaning for an engine. Everything else stays as it is.
_OWN_FIELDS: Final = frozenset({
    "access_programs", "background", "context_management", "conversation", "image", "include", "input", "instructions",
    "max_output_tokens", "max_tool_calls", "metadata", "moderation", "parallel_tool_calls", "previous_response_id",
    "prompt", "prompt_cache_options", "prompt_cache_retention", "reasoning", "store", "stream", "stream_options",
    "text", "tool_choice", "tools", "top_logprobs", "truncation",
})  # fmt: skip
_REFUSED: Final = {
    "background": "a response in the background",
    "conversation": "a stored conversation",
    "moderation": "moderation",
    "prompt": "a stored prompt",
}
LOGPROBS: Final = "message.output_text.logprobs"


def wants_logprobs(fields: Mapping[str, Any]) -> bool:
    """Whether the answer has logprobs."""
    return bool(fields.get("top_logprobs")) or LOGPROBS in a_list(fields.get("include") or [], "include")


def chat_request(fields: Mapping[str, Any]) -> Json:
    """The fields of a chat-completions body. Raises CallerError for what they cannot express."""
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise unsupported(name, what)
    options = dict(an_object_or_none(fields.get("stream_options"), "stream_options"))
    options.pop("include_obfuscation", None)
    chat = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
    chat["messages"] = _messages(fields)
    chat |= _tools(fields) | _format(fields) | _limits(fields) | streamed(fields, options)
    return chat


def _messages(fields: Mapping[str, Any]) -> list[Json]:
    messages = messages_of(fields.get("input"))
    instructions = fields.get("instructions")
    if instructions:
        messages.insert(0, {"role": "system", "content": a_text(instructions, "instructions")})
    return messages


def _tools(fields: Mapping[str, Any]) -> Json:
    """Tools and their choice. Engines refuse a choice without tools, so 'auto' and 'none' are left out there."""
    choice = fields.get("tool_choice")
    tools = [_tool(tool, where) for tool, where in objects(fields.get("tools"), "tools")]
    if not tools:
        return {} if choice in (None, "auto", "none") else {"tool_choice": _choice(choice)}
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = [tool.get("name") for tool, _ in objects(choice.get("tools"), "tool_choice.tools")]
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        choice = choice.get("mode", "auto")
        if not tools:
            raise wrong("tool_choice", "allows no tool that is in 'tools'")
    return without_nones(
        tools=tools, tool_choice=_choice(choice), parallel_tool_calls=fields.get("parallel_tool_calls")
    )


def _tool(tool: Mapping[str, Any], where: str) -> Json:
    if tool.get("type") != "function":
        raise unsupported(where, f"a tool of type {tool.get('type')!r}")
    function = {"name": a_text(tool.get("name"), f"{where}.name")}
    return {
        "type": "function",
        "function": function | without_nones(**{key: tool.get(key) for key in ("description", "parameters", "strict")}),
    }


def _choice(choice: object) -> str | Json | None:
    if choice is None or isinstance(choice, str):
        return choice
    named = an_object(choice, "tool_choice")
    if named.get("type") != "function":
        raise unsupported("tool_choice", f"a choice of type {named.get('type')!r}")
    return {"type": "function", "function": {"name": a_text(named.get("name"), "tool_choice.name")}}


def _format(fields: Mapping[str, Any]) -> Json:
    """`text.format`, as `response_format`."""
    wanted = an_object_or_none(an_object_or_none(fields.get("text"), "text").get("format"), "text.format")
    kind = wanted.get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind != "json_schema":
        raise unsupported("text.format", f"the format {kind!r}")
    schema = without_nones(**{key: wanted.get(key) for key in ("name", "description", "schema", "strict")})
    return {"response_format": {"type": kind, "json_schema": schema}}


def _limits(fields: Mapping[str, Any]) -> Json:
    limit, effort = (
        fields.get("max_output_tokens"),
        an_object_or_none(fields.get("reasoning"), "reasoning").get("effort"),
    )
    chat = without_nones(
        max_tokens=None if limit is None else a_limit(limit, "max_output_tokens"), reasoning_effort=effort
    )
    if wants_logprobs(fields):
        chat |= {"logprobs": True} | without_nones(top_logprobs=fields.get("top_logprobs"))
    return chat
