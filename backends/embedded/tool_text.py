"""Tool calls of the emulated model: the tool, and arguments that fit its schema."""

from __future__ import annotations

from typing import Any

from plait.backends.embedded.example_json import example_json
from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest


def called_tool(request: ChatRequest) -> dict[str, Any] | None:
    """The tool that `tool_choice` names, or the first tool for `required`; None without such a choice."""
    choice, tools = request.tool_choice, request.tools or []
    if choice is None or choice in ("auto", "none"):
        return None
    if choice == "required":
        if tools and _name(tools[0]) is not None:
            return tools[0]
        raise CallerError("'tool_choice' 'required' needs a function as the first of 'tools'", param="tool_choice")
    wanted = _name(choice)
    for tool in tools:
        if wanted is not None and _name(tool) == wanted:
            return tool
    raise CallerError(f"'tool_choice' names a tool that is not in 'tools': {choice!r}", param="tool_choice")


def example_arguments(tool: dict[str, Any]) -> str:
    """Arguments as JSON that fit the tool's schema."""
    return example_json(tool["function"].get("parameters"))


def _name(value: object) -> str | None:
    """The function's name in a tool or in a `tool_choice`."""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
