"""Brings the messages and tools of a chat into the form that SGLang gives to the chat template.

An engine attests this form: its fingerprint has a digest of what SGLang's own code makes of probe messages
(`ChatRendering.requested`). `chat_messages` has vLLM's form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final, NoReturn

from plait.backends.errors import UnsupportedError
from plait.backends.tokenization.chat_template import loops_over_content

_TEXTS: Final = ("text", "input_text")
_ROLES: Final = ("system", "assistant", "tool", "function", "developer")
_KEPT: Final = ("tool_call_id", "name", "phase", "reasoning_content")
"""Keys of messages other than a user's, in SGLang's order."""


def sglang_messages(messages: Sequence[Any], template: str) -> list[dict[str, Any]]:
    """OpenAI's messages as SGLang gives them to `template`.

    Raises UnsupportedError for what SGLang refuses, and for content that is not text.
    """
    as_parts = loops_over_content(template)
    return [_message(message, f"messages[{number}]", as_parts) for number, message in enumerate(messages)]


def sglang_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tools as they came, with the keys that SGLang knows. Raises UnsupportedError for what SGLang refuses."""
    return None if tools is None else [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def _message(message: object, where: str, as_parts: bool) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(role, str) or not (role == "user" or role in _ROLES):
        raise UnsupportedError(f"{where} has a role that SGLang does not know.", param=where)
    content = _content(message.get("content"), f"{where}.content", as_parts)
    if role == "user":
        return {"role": role, "content": content}
    if role == "tool" and isinstance(content, list):
        content = " ".join(part["text"] for part in content)
    ready: dict[str, Any] = {"role": role, "content": content}
    ready |= {key: message[key] for key in _KEPT if message.get(key) is not None}
    if message.get("tool_calls") is not None:
        ready["tool_calls"] = [_tool_call(call, role, where) for call in message["tool_calls"]]
    return ready


def _content(content: object, where: str, as_parts: bool) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UnsupportedError(f"{where} must be a string or a list of parts.", param=where)
    parts = [_text_part(part, where) for part in content]
    return parts if as_parts else " ".join(part["text"] for part in parts)


def _text_part(part: object, where: str) -> dict[str, Any]:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") in _TEXTS else None
    if not isinstance(text, str):
        raise UnsupportedError(f"{where} has a part that is not text; only text is supported.", param=where)
    return {"type": "text", "text": text}


def _tool_call(call: object, role: str, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise UnsupportedError(f"{where} has an entry that is not a function call.", param=where)
    arguments = function.get("arguments")
    if role == "assistant" and isinstance(arguments, str):
        arguments = _object(arguments, where)
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": call.get("type", "function"),
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_refused)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise UnsupportedError(f"{where} has a call whose arguments are no JSON object.", param=where)
    return arguments


def _integer(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"SGLang's parser makes another number of {text}")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"SGLang's parser refuses {text}")
    return value


def _refused(text: str) -> NoReturn:
    raise ValueError(f"SGLang's parser refuses {text}")


_OF_FUNCTION: Final = ("description", "name", "parameters")
_IF_GIVEN: Final = ("strict", "defer_loading")


def _tool(tool: object, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnsupportedError(f"{where} must be a function with a name.", param=where)
    deferred = tool.get("defer_loading")
    switches = (deferred, *(function.get(key) for key in _IF_GIVEN))
    if not all(switch is None or isinstance(switch, bool) for switch in switches):
        raise UnsupportedError(f"{where} has a switch that is no boolean.", param=where)
    known: dict[str, Any] = {key: function.get(key) for key in _OF_FUNCTION}
    known |= {key: function[key] for key in _IF_GIVEN if function.get(key) is not None}
    if deferred is not None:
        known.setdefault("defer_loading", deferred)
    given = [key for key in function if key in known]
    ordered = {key: known[key] for key in (*given, *known)}
    return {"type": tool.get("type", "function"), "function": ordered, "defer_loading": deferred}
