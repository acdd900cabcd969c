"""The tools of a `/v1/messages` request. Tools that Anthropic's servers run are left out. Others become functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from plait.backends.translation.fields import (
    Json,
    a_text,
    an_object,
    an_object_or_none,
    objects,
    unsupported,
    without_nones,
    wrong,
)

Fields = Mapping[str, Any]

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def _schema(required: str, **properties: Any) -> Json:
    types = {key: value if isinstance(value, dict) else {"type": value} for key, value in properties.items()}
    return {"type": "object", "properties": types, "required": [required]}


_RANGE: Final = {"type": "array", "items": {"type": "integer"}}
_CLIENTS: Final[Mapping[str, tuple[str, Json]]] = {
    "bash": ("Run a command on the user's machine.", _schema("command", command="string", restart="boolean")),
    "text_editor": (
        "View, create and edit text files. The commands are view, create, str_replace and insert.",
        _schema(
            "command", command="string", path="string", view_range=_RANGE, file_text="string", old_str="string",
            new_str="string", insert_line="integer", insert_text="string",
        ),
    ),
    "memory": (
        "Keep files below /memories. The commands are view, create, str_replace, insert, delete and rename.",
        _schema(
            "command", command="string", path="string", view_range=_RANGE, file_text="string", old_str="string",
            new_str="string", insert_line="integer", insert_text="string", old_path="string", new_path="string",
        ),
    ),
}  # fmt: skip
"""Tools that clients run and only Anthropic's models know: type without its date -> (description, schema)."""


def tool_fields(fields: Fields) -> Json:
    """Tools and their choice. Without tools, the choice is left out, since engines refuse it then."""
    given = fields.get("tools")
    tools = [_tool(tool, where) for tool, where in objects(given, "tools") if not _is_hosted(tool, where)]
    choice = an_object_or_none(fields.get("tool_choice"), "tool_choice")
    ignored = [] if len(tools) == len(given or ()) else ignored_tools(fields)
    chosen = _choice(choice)
    if chosen == "required" and ignored and not tools:
        where, _, kind = ignored[0].partition(":")
        raise unsupported(where, f"a tool of type {kind!r}")
    if isinstance(chosen, dict) and ignored:
        name = chosen["function"]["name"]
        if name not in [tool["function"]["name"] for tool in tools]:
            raise unsupported("tool_choice", f"the tool {name!r}")
    if not tools:
        return {}
    parallel = False if choice.get("disable_parallel_tool_use") else None
    return without_nones(tools=tools, tool_choice=chosen, parallel_tool_calls=parallel)


def ignored_tools(fields: Fields) -> list[str]:
    """The left-out tools by place and type, such as `tools[8]:web_search_20250305`; and `mcp_servers`, if any."""
    tools = objects(fields.get("tools"), "tools")
    ignored = [f"{where}:{tool['type']}" for tool, where in tools if _is_hosted(tool, where)]
    return [*ignored, "mcp_servers"] if fields.get("mcp_servers") else ignored


def _is_hosted(tool: Fields, where: str) -> bool:
    kind = tool.get("type")
    if kind is not None and not isinstance(kind, str):
        raise wrong(f"{where}.type", "must be a string")
    return kind not in (None, "custom") and _client_tool(tool) is None


def _client_tool(tool: Fields) -> tuple[str, Json] | None:
    kind = tool.get("type")
    return None if kind is None else _CLIENTS.get(kind.rpartition("_")[0])


def _tool(tool: Fields, where: str) -> Json:
    name, known = a_text(tool.get("name"), f"{where}.name"), _client_tool(tool)
    if known is not None:
        return {"type": "function", "function": {"name": name, "description": known[0], "parameters": known[1]}}
    described = without_nones(description=tool.get("description"), strict=tool.get("strict"))
    schema = an_object(tool.get("input_schema"), f"{where}.input_schema")
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _choice(choice: Fields) -> str | Json | None:
    kind = choice.get("type")
    if not choice:
        return None
    if kind == "tool":
        return {"type": "function", "function": {"name": a_text(choice.get("name"), "tool_choice.name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise wrong("tool_choice.type", "must be 'auto', 'any', 'tool' or 'none'")
    return _CHOICES[kind]
