"""Brings the messages and tools of a chat into the form that vLLM gives to the chat template.

A prompt's token ids depend on details of this form: which keys a message keeps, how parts are joined, the order of a
tool's keys. So the steps are those of vLLM 0.33, for every template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from plait.backends.errors import CallerError, UnsupportedError
from plait.backends.tokenization.chat_template import loops_over_content

# The types of content parts that are text, and the key that holds the text.
TEXT_KEYS: Final = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"
}  # fmt: skip

# Claude Code begins its system prompt with a line that differs in each call. vLLM drops the line for prefix caching.
BILLING_LINE: Final = "x-anthropic-billing-header"


def template_messages(messages: Sequence[Any], template: str) -> list[dict[str, Any]]:
    """OpenAI's messages as `template` expects them: content in parts if the template loops over it, else as a string.

    Raises CallerError for a malformed message, UnsupportedError for content that is not text.
    """
    as_parts = loops_over_content(template)
    prepared: list[dict[str, Any]] = []
    has_developer = False
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            where = f"messages[{len(prepared)}]"
            raise CallerError(f"{where} must be an object with a role.", param=where)
        content = message.get("content")
        if as_parts or type(content) is not str or content.startswith(BILLING_LINE):
            content = _content(role, content, f"messages[{len(prepared)}].content", as_parts)
        ready = {"role": role, "content": content}
        if role != "user":
            _add_fields_of_role(ready, message, f"messages[{len(prepared)}].tool_calls")
            has_developer = has_developer or role == "developer"
        for key in ("name", "task"):
            if key in message and isinstance(message[key], str):
                ready[key] = message[key]
        prepared.append(ready)
    if has_developer and '"developer"' not in template and "'developer'" not in template:
        return _developer_as_system(prepared)
    return prepared


def template_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools with vLLM's keys in vLLM's order, because templates print a tool as it is."""
    if tools is None:
        return None
    return [_tool(tool, index) for index, tool in enumerate(tools)]


def _tool(tool: object, index: int) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CallerError(f"tools[{index}] must be a function with a name.", param=f"tools[{index}]")
    described = {key: function.get(key) for key in ("name", "description", "parameters")}
    described |= {key: function[key] for key in ("strict", "defer_loading") if function.get(key) is not None}
    return {"type": "function", "function": described}


def _content(role: str, content: object, where: str, as_parts: bool) -> str | list[dict[str, Any]]:
    parts = list(_text_parts(content, where))
    if role == "system":
        parts = [part for part in map(_without_billing_line, parts) if part is not None]
    if as_parts and role != "tool":
        return parts
    # Templates take a tool's result as a string, even if they loop over other content.
    return "\n".join(part["text"] for part in parts if part["text"] or as_parts)


def _add_fields_of_role(ready: dict[str, Any], message: Mapping[str, Any], where: str) -> None:
    """Add the fields that a message of its role has besides content. `where` is the place of its tool calls."""
    role = ready["role"]
    if role == "assistant":
        ready |= _assistant_fields(message, where)
    elif role == "tool" and "tool_call_id" in message:
        ready["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        ready["tools"] = message.get("tools")


def _text_parts(content: object, where: str) -> Iterator[dict[str, Any]]:
    """The content as text parts: `{"type": "text", "text": ...}` and any other keys of the client."""
    if content is None:
        return
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    if not isinstance(content, Sequence):
        raise CallerError(f"{where} must be a string or a list of parts.", param=where)
    for part in content:
        if isinstance(part, str):
            yield {"type": "text", "text": part}
            continue
        if not isinstance(part, Mapping):
            raise CallerError(f"{where} has a part that is not an object.", param=where)
        kind = part.get("type", "text")
        if not isinstance(kind, str) or kind not in TEXT_KEYS:
            raise UnsupportedError(f"{where} has a part of type {kind!r}; only text is supported.", param=where)
        text = part.get(TEXT_KEYS[kind])
        if isinstance(text, str):
            extra = {key: value for key, value in part.items() if key not in ("type", TEXT_KEYS[kind])}
            yield {"type": "text", "text": text} | extra
        elif text is not None:
            raise CallerError(f"{where} has a part whose text is not a string.", param=where)


def _without_billing_line(part: dict[str, Any]) -> dict[str, Any] | None:
    if not part["text"].startswith(BILLING_LINE):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _assistant_fields(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list | tuple):
        raise CallerError(f"{where} must be a list.", param=where)
    if calls:
        fields["tool_calls"] = [_tool_call(call, where) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return fields


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise CallerError(f"{where} has an entry that is not a function call.", param=where)
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> dict[str, Any]:
    """A call's arguments as the object that templates expect.

    Anything but a JSON object becomes an empty object. Bad arguments stay in the conversation's history, so an error
    would fail every later turn.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def _developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """System and developer messages merged into one system message at the start, where most templates expect it."""
    system = [message for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    if len(system) == 1 and system[0] is messages[0]:
        first = {key: value for key, value in system[0].items() if key != "tools"} | {"role": "system"}
        return [first, *others]
    texts = [
        content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        for content in (message["content"] for message in system)
    ]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]
