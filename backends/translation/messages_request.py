"""Translates the body of a `/v1/messages` request, with its content blocks, into a chat-completions body."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from plait.backends.protocol.message_content import content_text
from plait.backends.translation.chat_history import arguments_of, content_of, ordered, text_part
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
from plait.backends.translation.messages_blocks import Block, blocks_of, parts_of, text_of
from plait.backends.translation.messages_tools import tool_fields

# Claude Code begins its system prompt with a block that differs in each call, so no call would hit another's prompt in
# the engine's cache. The block is left out.
BILLING_LINE: Final = "x-anthropic-billing-header"


def system_messages(system: object) -> list[Json]:
    """The system prompt, a text or text blocks, as one message; none without a prompt."""
    return _system(system, "system") if system else []


def chat_messages(messages: object) -> list[Json]:
    """Anthropic's messages as those of a chat-completions body. Raises CallerError for malformed blocks."""
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "must be a non-empty list")
    return [chat for message, where in objects(messages, "messages") for chat in _chat(message, where)]


def _chat(message: Mapping[str, Any], where: str) -> list[Json]:
    role, place = message.get("role"), f"{where}.content"
    if role == "user":
        return list(_user(blocks_of(message.get("content"), place)))
    if role == "assistant":
        return [_assistant(blocks_of(content_of(message.get("content")), place))]
    if role == "system":
        return _system(message.get("content"), place)
    raise wrong(f"{where}.role", "must be 'user', 'assistant' or 'system'")


def _system(content: object, where: str) -> list[Json]:
    texts = [text_of(block, place) for block, place in blocks_of(content, where)]
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
            parts += parts_of(block, where)
    if parts or not results:
        yield {"role": "user", "content": one_or_parts(parts)}


def _tool_result(block: Mapping[str, Any], where: str) -> Json:
    blocks = blocks_of(content_of(block.get("content")), f"{where}.content")
    parts = [part for inner, place in blocks for part in parts_of(inner, place)]
    if block.get("is_error"):  # a `tool` message has no such field
        parts.insert(0, text_part("Error:"))
        parts = _joined(parts)
    call_id = a_text(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": call_id, "content": one_or_parts(parts)}


def _joined(parts: list[Json]) -> list[Json]:
    """One text if all parts are texts."""
    if all(part["type"] == "text" for part in parts):
        return [text_part("\n".join(part["text"] for part in parts))]
    return parts


def _assistant(blocks: Iterable[Block]) -> Json:
    """One message. Redacted thinking is left out, since only Anthropic's models can read it."""
    thought, parts, calls = "", list[Json](), list[Json]()
    for block, where in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thought += content_text(block.get("thinking"))
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind != "redacted_thinking":
            parts.append(text_part(text_of(block, where)))
    message: Json = {"role": "assistant", "content": one_or_parts(parts) or (None if calls else "")}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> Json:
    call_id, name = (a_text(block.get(key), f"{where}.{key}") for key in ("id", "name"))
    function = {"name": name, "arguments": arguments_of(block.get("input"))}
    return {"id": call_id, "type": "function", "function": function}


# Fields that are translated, refused, or left out because engines have no use for them. All others are passed on.
_OWN_FIELDS: Final = frozenset({
    "betas", "cache_control", "container", "context_management", "diagnostics", "inference_geo", "max_tokens",
    "mcp_servers", "messages", "metadata", "output_config", "output_format", "service_tier", "speed",
    "stop_sequences", "stream", "system", "thinking", "tool_choice", "tools", "user_profile_id", "workspace_id",
})  # fmt: skip
_REFUSED: Final = {"container": "a container"}

BUDGET: Final = "thinking_token_budget"
"""vLLM's field for the most tokens of a thought."""


def chat_request(fields: Mapping[str, Any]) -> Json:
    """The fields of a chat-completions body. Raises CallerError for missing, malformed and refused fields."""
    if fields.get("max_tokens") is None:
        raise wrong("max_tokens", "is required: the most tokens that the answer may have")
    return {
        **prompt_request(fields),
        "max_tokens": a_limit(fields["max_tokens"], "max_tokens"),
        **_sampling(fields),
        **streamed(fields, {}),
    }


def prompt_request(fields: Mapping[str, Any]) -> Json:
    """The chat-completions fields that the prompt depends on, and all fields outside `_OWN_FIELDS`, unchanged.

    This translates the whole body of `/v1/messages/count_tokens`. Raises CallerError.
    """
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise unsupported(name, what)
    chat = without_nones(**{name: value for name, value in fields.items() if name not in _OWN_FIELDS})
    messages = ordered([*system_messages(fields.get("system")), *chat_messages(fields.get("messages"))])
    if not messages:  # system messages without a text are left out
        raise wrong("messages", "has no content")
    return {**chat, "messages": messages, **_prefill(messages), **_thinking(fields), **tool_fields(fields)}


def _prefill(messages: list[Json]) -> Json:
    """Make the model continue a last message of the assistant, as Anthropic's models do."""
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last or not last["content"]:
        return {}
    return {"add_generation_prompt": False, "continue_final_message": True}


def _thinking(fields: Mapping[str, Any]) -> Json:
    """The chat templates' switch for thinking, the effort, and the budget of tokens, which vLLM alone has."""
    thinking = an_object_or_none(fields.get("thinking"), "thinking")
    kind = thinking.get("type")
    chat = without_nones(reasoning_effort=_output(fields).get("effort"))
    if kind == "enabled" and thinking.get("budget_tokens") is not None:
        chat[BUDGET] = a_limit(thinking["budget_tokens"], "thinking.budget_tokens")
    if kind in ("enabled", "disabled"):
        options = an_object_or_none(fields.get("chat_template_kwargs"), "chat_template_kwargs")
        chat["chat_template_kwargs"] = {"enable_thinking": kind == "enabled", **options}
    return chat


def _output(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return an_object_or_none(fields.get("output_config"), "output_config")


def _sampling(fields: Mapping[str, Any]) -> Json:
    stop = fields.get("stop_sequences")
    user = an_object_or_none(fields.get("metadata"), "metadata").get("user_id")
    return without_nones(
        stop=texts(stop, "stop_sequences") if stop else None, user=user, response_format=_format(fields)
    )


def _format(fields: Mapping[str, Any]) -> Json | None:
    """`output_config.format`, in the beta `output_format`, as `response_format` with the name that OpenAI requires."""
    wanted, where = _output(fields).get("format"), "output_config.format"
    if wanted is None:
        wanted, where = fields.get("output_format"), "output_format"
    if wanted is None:
        return None
    schema = an_object(an_object(wanted, where).get("schema"), f"{where}.schema")
    json_schema = {"name": "output", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": json_schema}
