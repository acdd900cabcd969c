"""Tool calls of the emulated model: which tool a request makes it call, and arguments that fit the tool's schema."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.errors import CallerError
from backends.openai_protocol import ChatRequest

_EXAMPLES: dict[str, Any] = {"string": "emulated", "integer": 1, "number": 1.0, "boolean": True, "null": None}


def called_tool(request: ChatRequest) -> dict[str, Any] | None:
    """The tool that `tool_choice` asks for: the one it names, the first if it is `required`, else none."""
    choice, tools = request.tool_choice, request.tools or []
    if choice is None or choice in ("auto", "none"):
        return None
    if choice == "required":
        if not tools:
            raise CallerError("'tool_choice' is 'required' but 'tools' is empty", param="tool_choice")
        return tools[0]
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    for tool in tools:
        if name is not None and tool.get("function", {}).get("name") == name:
            return tool
    raise CallerError(f"'tool_choice' names no tool of 'tools': {choice!r}", param="tool_choice")


def example_arguments(tool: dict[str, Any]) -> str:
    """Arguments as JSON, with a value for every required property."""
    return msgspec.json.encode(_example(tool["function"].get("parameters") or {})).decode()


def _example(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "array":
        return []
    if schema.get("type") in _EXAMPLES:
        return _EXAMPLES[schema["type"]]
    properties = schema.get("properties") or {}
    return {name: _example(properties.get(name) or {}) for name in schema.get("required") or ()}
