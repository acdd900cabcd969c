"""A request to `/v1/messages`, as one to chat completions. Its messages are made of content blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from plait.backends.translation.fields import (
    Json,
    a_limit,
    a_text,
    an_object,
    an_object_or_none,
    objects,
    one_or_parts,
    streamed,
    texts,
    unsupported,
    without_nones,
    wrong,
)

# Claude Code begins its system prompt with a block that differs in each call. No call could find another's prompt
# in the engine's cache behind it.
BILLING_LINE: Final = "x-anthropic-billing-header"

Block = tuple[Mapping[str, Any], str]
"""A content block and its place in the body."""


def system_messages(system: object) -> list[Json]:
    """The system prompt, a text or text blocks, as one message; none without a prompt."""
    return _system(system, "system") if system else []


def chat_messages(messages: object) -> list[Json]:
    """The messages for Anthropic's. Raises CallerError for malformed blocks, and for types that have no counterpart."""
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "must be a non-empty list")
    return [chat for message, where in objects(messages, "messages") for chat in _chat(message, where)]


def _chat(message: Mapping[str, Any], where: str) -> list[Json]:
    role, place = message.get("role"), f"{where}.content"
    if role == "user":
        return list(_user(_blocks(message.get("content"), place)))
    if role == "assistant":
        return [_assistant(_blocks(message.get("content"), place))]
    if role == "system":
        return _system(message.get("content"), place)
    raise wrong(f"{where}.role", "must be 'user', 'assistant' or 'system'")


def _blocks(content: object, where: str) -> list[Block]:
    """The content as blocks; a text is one block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if content is None:
        raise wrong(where, "is missing")
    return list(objects(content, where))


def _system(content: object, where: str) -> list[Json]:
    texts = [_text(block, place) for block, place in _blocks(content, where)]
    text = "\n".join(text for text in texts if text and not text.startswith(BILLING_LINE))
    return [{"role": "system", "content": text}] if text else []


def _user(blocks: Iterable[Block]) -> Iterator[Json]:
    """A message for each tool's result, and one for the rest."""
    parts: list[Json] = []
    results = False
    for block, where in blocks:
        if block.get("type") == "tool_result":
            results = True
            yield _tool_result(block, where)
        else:
            parts.append(_part(block, where))
    if parts or not results:
        yield {"role": "user", "content": one_or_parts(parts)}


def _tool_result(block: Mapping[str, Any], where: str) -> Json:
    content = block.get("content")
    parts = [_part(part, place) for part, place in ([] if content is None else _blocks(content, f"{where}.content"))]
    if block.get("is_error"):  # a `tool` message has no such mark
        parts.insert(0, {"type": "text", "text": "Error:"})
        parts = _joined(parts)
    call_id = a_text(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": call_id, "content": one_or_parts(parts)}


def _joined(parts: list[Json]) -> list[Json]:
    """One text if all parts are texts."""
    if all(part["type"] == "text" for part in parts):
        return [{"type": "text", "text": "\n".join(part["text"] for part in parts)}]
    return parts


def _part(block: Mapping[str, Any], where: str) -> Json:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": _text(block, where)}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(block, f"{where}.source")}}
    raise unsupported(where, f"a block of type {kind!r}")


def _text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise unsupported(where, f"a block of type {block.get('type')!r}")
    return a_text(block.get("text"), f"{where}.text")


def _image_url(block: Mapping[str, Any], where: str) -> str:
    source = an_object(block.get("source"), where)
    kind = source.get("type")
    if kind == "url":
        return a_text(source.get("url"), f"{where}.url")
    if kind == "base64":
        media, data = (a_text(source.get(key), f"{where}.{key}") for key in ("media_type", "data"))
        return f"data:{media};base64,{data}"
    raise unsupported(where, f"an image by {kind!r}")


def _assistant(blocks: Iterable[Block]) -> Json:
    """One message. Thoughts that are redacted are left out, since only Anthropic's models can read them."""
    thought, parts, calls = "", list[Json](), list[Json]()
    for block, where in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thought += a_text(block.get("thinking"), f"{where}.thinking")
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind != "redacted_thinking":
            parts.append({"type": "text", "text": _text(block, where)})
    message: Json = {"role": "assistant", "content": one_or_parts(parts) or (None if calls else "")}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> Json:
    arguments = msgspec.json.encode(an_object_or_none(block.get("input"), f"{where}.input")).decode()
    call_id, name = (a_text(block.get(key), f"{where}.{key}") for key in ("id", "name"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


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
