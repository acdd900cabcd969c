"""A request to `/v1/responses`, as one to chat completions. Its input is made of items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from plait.backends.translation.fields import (
    Json,
    a_limit,
    a_list,
    a_text,
    an_object,
    an_object_or_none,
    objects,
    one_or_parts,
    streamed,
    unsupported,
    without_nones,
    wrong,
)

ROLES = frozenset({"user", "assistant", "system", "developer"})


def messages_of(value: object) -> list[Json]:
    """The messages for `input`, a text or a list of items. Raises CallerError.

    What the assistant said and called in a row is one message, as chat completions have it.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input", "must be a text or a non-empty list of items")
    messages = _Messages()
    for item, where in objects(value, "input"):
        messages.add(item, where)
    return messages.messages


class _Messages:
    """The messages so far. `_thought` waits for the message or the call that it led to."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._thought = ""

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._thought = ""
            call_id = a_text(item.get("call_id"), f"{where}.call_id")
            content = _content(item.get("output"), f"{where}.output")
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "reasoning":
            self._thought += _thought(item, where)
        elif kind == "item_reference":
            raise unsupported(where, "a reference to a stored item")
        else:
            raise unsupported(where, f"an item of type {kind!r}")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise wrong(f"{where}.role", f"must be one of {', '.join(sorted(ROLES))}")
        message = {"role": role, "content": _content(item.get("content"), f"{where}.content")}
        if role == "assistant":
            self._think(message)
        self._thought = ""
        self.messages.append(message)

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or self._thought:
            last = {"role": "assistant", "content": None}
            self._think(last)
            self.messages.append(last)
        function = {key: a_text(item.get(key), f"{where}.{key}") for key in ("name", "arguments")}
        call_id = a_text(item.get("call_id"), f"{where}.call_id")
        last.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _think(self, message: Json) -> None:
        if self._thought:
            message["reasoning_content"] = self._thought
        self._thought = ""


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item; none if it is encrypted."""
    return "".join(
        a_text(part.get("text"), f"{place}.text") for part, place in objects(item.get("content"), f"{where}.content")
    )


def _content(content: object, where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    a_list(content, where)
    return one_or_parts([part for item, place in objects(content, where) for part in _parts(item, place)])


def _parts(part: Mapping[str, Any], where: str) -> Iterator[Json]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        yield {"type": "text", "text": a_text(part.get("text"), f"{where}.text")}
    elif kind == "refusal":
        yield {"type": "refusal", "refusal": a_text(part.get("refusal"), f"{where}.refusal")}
    elif kind == "input_image":
        if part.get("image_url") is None:
            raise unsupported(where, "an image by 'file_id'; send its 'image_url'")
        url = a_text(part["image_url"], f"{where}.image_url")
        yield {"type": "image_url", "image_url": without_nones(url=url, detail=part.get("detail"))}
    elif kind == "input_audio":
        yield {"type": "input_audio", "input_audio": part.get("input_audio")}
    else:
        raise unsupported(where, f"a part of type {kind!r}")


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
