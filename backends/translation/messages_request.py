"""A request to `/v1/messages`, as one to chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from plait.backends.translation.fields import (
    Json,
    a_limit,
    a_text,
    an_object,
    an_object_or_none,
    objects,
    streamed,
    texts,
    unsupported,
    without_nones,
    wrong,
)
from plait.backends.translation.message_blocks import chat_messages, system_messages

# What is translated, or without a meaning for an engine. Everything else stays as it is.
_OWN_FIELDS: Final = frozenset({
    "betas", "cache_control", "container", "context_management", "diagnostics", "inference_geo", "max_tokens",
    "mcp_servers", "messages", "metadata", "output_config", "service_tier", "speed", "stop_sequences", "stream",
    "system", "thinking", "tool_choice", "tools", "user_profile_id", "workspace_id",
})  # fmt: skip
_REFUSED: Final = {"container": "a container", "mcp_servers": "a tool of an MCP server"}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(fields: Mapping[str, Any]) -> Json:
    """The fields of a chat-completions body. Raises CallerError for what they cannot express."""
    if fields.get("max_tokens") is None:
        raise wrong("max_tokens", "is required: the most tokens that the answer may have")
    return {
        **prompt_request(fields),
        "max_tokens": a_limit(fields["max_tokens"], "max_tokens"),
        **_sampling(fields),
        **streamed(fields, {}),
    }


def prompt_request(fields: Mapping[str, Any]) -> Json:
    """Those fields of a chat-completions body that its prompt depends on, and those that Anthropic's API lacks.

    The body of `/v1/messages/count_tokens` has no others. Raises CallerError.
    """
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise unsupported(name, what)
    chat = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
    messages = [*system_messages(fields.get("system")), *chat_messages(fields.get("messages"))]
    if not messages:  # system messages without a text are left out
        raise wrong("messages", "has no content")
    return {**chat, "messages": messages, **_prefill(messages), **_thinking(fields), **_tools(fields)}


def _prefill(messages: list[Json]) -> Json:
    """The model continues a last message of its own, as Anthropic's do."""
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last or not last["content"]:
        return {}
    return {"add_generation_prompt": False, "continue_final_message": True}


def _thinking(fields: Mapping[str, Any]) -> Json:
    """The switch that chat templates have for thinking, and the effort. A budget of tokens has no counterpart."""
    kind = an_object_or_none(fields.get("thinking"), "thinking").get("type")
    chat = without_nones(reasoning_effort=_output(fields).get("effort"))
    if kind in ("enabled", "disabled"):
        options = an_object_or_none(fields.get("chat_template_kwargs"), "chat_template_kwargs")
        chat["chat_template_kwargs"] = {"enable_thinking": kind == "enabled", **options}
    return chat


def _output(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return an_object_or_none(fields.get("output_config"), "output_config")


def _tools(fields: Mapping[str, Any]) -> Json:
    """Tools and their choice. Engines refuse a choice without tools, so it is left out there."""
    tools = [_tool(tool, where) for tool, where in objects(fields.get("tools"), "tools")]
    choice = an_object_or_none(fields.get("tool_choice"), "tool_choice")
    if not tools:
        return {}
    parallel = False if choice.get("disable_parallel_tool_use") else None
    return without_nones(tools=tools, tool_choice=_choice(choice), parallel_tool_calls=parallel)


def _tool(tool: Mapping[str, Any], where: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(where, f"a tool of type {tool.get('type')!r}")
    described = without_nones(description=tool.get("description"), strict=tool.get("strict"))
    schema = an_object(tool.get("input_schema"), f"{where}.input_schema")
    return {
        "type": "function",
        "function": {"name": a_text(tool.get("name"), f"{where}.name"), **described, "parameters": schema},
    }


def _choice(choice: Mapping[str, Any]) -> str | Json | None:
    kind = choice.get("type")
    if not choice:
        return None
    if kind == "tool":
        return {"type": "function", "function": {"name": a_text(choice.get("name"), "tool_choice.name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise wrong("tool_choice.type", "must be 'auto', 'any', 'tool' or 'none'")
    return _CHOICES[kind]


def _sampling(fields: Mapping[str, Any]) -> Json:
    stop = fields.get("stop_sequences")
    user = an_object_or_none(fields.get("metadata"), "metadata").get("user_id")
    return without_nones(
        stop=texts(stop, "stop_sequences") if stop else None, user=user, response_format=_format(fields)
    )


def _format(fields: Mapping[str, Any]) -> Json | None:
    """`output_config.format`, as `response_format`. Anthropic's has no name, which OpenAI's needs."""
    wanted = _output(fields).get("format")
    if wanted is None:
        return None
    schema = an_object(wanted, "output_config.format").get("schema")
    json_schema = {"name": "output", "schema": an_object(schema, "output_config.format.schema"), "strict": True}
    return {"type": "json_schema", "json_schema": json_schema}
