"""The tools of a response. The engine gets a function for each tool, and its calls become items of the tool's own type.

A tool that its vendor runs is left out. `TOOL_KINDS` has all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from plait.backends.protocol.message_content import content_text
from plait.backends.translation.chat_history import arguments_of, content_of
from plait.backends.translation.fields import (
    Json,
    a_text,
    an_object,
    objects,
    one_or_parts,
    unsupported,
    without_nones,
    wrong,
)
from plait.backends.translation.tool_calls import ToolCall

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolKind:
    """One type of tools. `item` is the type of its call's items, `prefix` the beginning of their ids."""

    item: str
    prefix: str

    function: Callable[[Fields, str], Json]
    """The function for a tool at a place in the body."""

    fields: Callable[[ToolCall], Json]
    """The fields of a call's item that only this type has."""

    arguments: Callable[[Fields, str], str]
    """The function's arguments for a call's item at a place in the body."""

    delta: tuple[str, str] | None = None
    """The event that streams a field of the item, and that field; None: the call is in the item alone."""

    has_name: bool = False
    """Whether each tool has a name of its own, instead of the type's."""


def _schema(required: Iterable[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_TEXT: Final[Json] = {"type": "string"}
_TEXTS: Final[Json] = {"type": "array", "items": _TEXT}
_NUMBER: Final[Json] = {"type": "integer"}


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _function(tool: Fields, where: str) -> Json:
    described = without_nones(**{key: tool.get(key) for key in ("description", "parameters", "strict")})
    return {"name": a_text(tool.get("name"), f"{where}.name"), **described}


def _function_arguments(item: Fields, where: str) -> str:
    if "arguments" not in item:
        raise wrong(f"{where}.arguments", "is missing")
    return arguments_of(item["arguments"])


def _custom(tool: Fields, where: str) -> Json:
    """A function with one text. The tool's grammar is only described in words."""
    said, form = [tool.get("description")], tool.get("format")
    if isinstance(form, Mapping) and form.get("definition"):
        said.append(f"The input follows this grammar ({form.get('syntax')}):\n{form['definition']}")
    description = "\n\n".join(str(text) for text in said if text) or None
    name = a_text(tool.get("name"), f"{where}.name")
    return without_nones(name=name, description=description, parameters=_schema(["input"], input=_TEXT))


def _custom_input(call: ToolCall) -> Json:
    """The text of the arguments' only field, whatever its name; otherwise the arguments as they are."""
    texts = [value for value in (call.values or {}).values() if isinstance(value, str)]
    return {"input": texts[0] if len(texts) == 1 else call.arguments}


def _named(name: str, description: str, parameters: Json) -> Callable[[Fields, str], Json]:
    return lambda tool, where: {"name": name, "description": description, "parameters": parameters}  # noqa: ARG005


def _local_shell_action(call: ToolCall) -> Json:
    values = call.values or {}
    command = values.get("command")
    if not isinstance(command, list):
        command = ["bash", "-lc", str(command)] if command else []
    more = {key: values.get(key) for key in ("timeout_ms", "user", "working_directory")}
    return {"action": {"type": "exec", "command": [str(word) for word in command], "env": {}, **more}}


def _shell_action(call: ToolCall) -> Json:
    values = call.values or {}
    commands = values.get("commands")
    commands = commands if isinstance(commands, list) else [commands] if commands else []
    more = {key: values.get(key) for key in ("timeout_ms", "max_output_length")}
    return {"action": {"commands": [str(command) for command in commands], **more}, "environment": None}


def _tool_search(tool: Fields, where: str) -> Json:  # noqa: ARG001
    parameters = tool.get("parameters") or _schema(["query"], query=_TEXT)
    return {"name": "tool_search", "description": tool.get("description") or "Find tools.", "parameters": parameters}


def _of(*keys: str) -> Callable[[Fields, str], str]:
    """The arguments under one of the item's keys."""
    return lambda item, where: _encoded(  # noqa: ARG005
        next((item[key] for key in keys if isinstance(item.get(key), Mapping)), {})
    )


TOOL_KINDS: Final[Mapping[str, ToolKind]] = {
    "function": ToolKind(
        "function_call",
        "fc",
        _function,
        lambda call: {"arguments": call.arguments if call.arguments.strip() else "{}"},
        _function_arguments,
        ("function_call_arguments", "arguments"),
        has_name=True,
    ),
    "custom": ToolKind(
        "custom_tool_call",
        "ctc",
        _custom,
        _custom_input,
        lambda item, where: _encoded({"input": content_text(item.get("input"))}),  # noqa: ARG005
        ("custom_tool_call_input", "input"),
        has_name=True,
    ),
    "local_shell": ToolKind(
        "local_shell_call",
        "lsh",
        _named(
            "local_shell",
            "Run a command on the user's machine.",
            _schema(["command"], command=_TEXTS, working_directory=_TEXT, timeout_ms=_NUMBER),
        ),
        _local_shell_action,
        _of("action"),
    ),
    "shell": ToolKind(
        "shell_call",
        "sh",
        _named(
            "shell",
            "Run shell commands on the user's machine.",
            _schema(["commands"], commands=_TEXTS, timeout_ms=_NUMBER, max_output_length=_NUMBER),
        ),
        _shell_action,
        _of("action"),
    ),
    "apply_patch": ToolKind(
        "apply_patch_call",
        "apc",
        _named(
            "apply_patch",
            "Create, update or delete a file. The diff is in the V4A form, and empty for a file that is deleted.",
            _schema(
                ["type", "path"],
                type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                path=_TEXT,
                diff=_TEXT,
            ),
        ),
        lambda call: {"operation": call.values or {}},
        _of("operation"),
    ),
    "tool_search": ToolKind(
        "tool_search_call",
        "tsc",
        _tool_search,
        lambda call: {"arguments": call.values or {}, "execution": "client"},
        _of("arguments"),
    ),
}

CALL_ITEMS: Final[Mapping[str, str]] = {kind.item: name for name, kind in TOOL_KINDS.items()}
"""The type of a call's item -> the type of the tool."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a request. `function` is OpenAI's object, with the name that the engine gets."""

    kind: str
    name: str
    namespace: str | None
    function: Json


FUNCTION: Final = TOOL_KINDS["function"]


class ResponseTools:
    """The tools of one request, from its `tools` and from items that add tools. Raises `CallerError`.

    `ignored` names the tools that are left out, as in `tools[8]:web_search`.
    """

    def __init__(self, fields: Fields) -> None:
        self.ignored: list[str] = []
        self._tools: dict[str, Tool] = {}
        self._flat: dict[tuple[str, str, str | None], str] = {}
        for tool, where in _given(fields):
            if _is_ignored(tool):
                self.ignored.append(_placed(tool, where))
            else:
                self._add(tool, where)

    @property
    def functions(self) -> list[Json]:
        return [{"type": "function", "function": tool.function} for tool in self._tools.values()]

    def flat(self, kind: str, name: str, namespace: str | None) -> str:
        return self._flat.get((kind, name, namespace)) or _flat(name, namespace)

    def item(self, call: ToolCall) -> tuple[ToolKind, Json]:
        """The type of a call, and the fields of its item without those that all items have."""
        tool = self._tools.get(call.name)
        if tool is None:  # a name that the model has made up
            return FUNCTION, {"name": call.name, **FUNCTION.fields(call)}
        kind = TOOL_KINDS[tool.kind]
        named = without_nones(name=tool.name, namespace=tool.namespace) if kind.has_name else {}
        return kind, {**named, **kind.fields(call)}

    def chosen(self, choice: Fields, where: str) -> str | None:
        """The engine's name of the tool that a choice names; None for one that is left out."""
        kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
        if not isinstance(kind, str):
            raise wrong(f"{where}.type", "must be a string")
        if kind not in TOOL_KINDS:
            return None
        if TOOL_KINDS[kind].has_name:
            a_text(name, f"{where}.name")
        else:
            name = kind
        return self.flat(kind, str(name), namespace if isinstance(namespace, str) else None)

    def _add(self, tool: Fields, where: str, namespace: str | None = None) -> None:
        kind = tool["type"]
        if kind == "namespace":
            name = a_text(tool.get("name"), f"{where}.name")
            for inner, place in objects(tool.get("tools"), f"{where}.tools"):
                if inner.get("type") in ("function", "custom"):
                    self._add(inner, place, name)
            return
        function = TOOL_KINDS[kind].function(tool, where)
        own = kind, function["name"], namespace
        if own in self._flat:
            return
        flat = self._flat[own] = self._unused(_flat(function["name"], namespace))
        self._tools[flat] = Tool(kind, function["name"], namespace, {**function, "name": flat})

    def _unused(self, name: str) -> str:
        number, unused = 1, name
        while unused in self._tools:
            number += 1
            unused = f"{name}_{number}"
        return unused


def _given(fields: Fields) -> Iterator[tuple[Fields, str]]:
    """All tools with their places: in `tools`, and in items of the input that add tools or are results of searches."""
    yield from objects(fields.get("tools"), "tools")
    given = fields.get("input")
    for number, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, dict) and item.get("type") in ("tool_search_output", "additional_tools"):
            yield from objects(item.get("tools"), f"input[{number}].tools")


def ignored_tools(fields: Fields) -> list[str]:
    """The tools that are left out, as in `tools[8]:web_search`. Raises CallerError for one without a type."""
    return [_placed(tool, where) for tool, where in _given(fields) if _is_ignored(tool)]


def _placed(tool: Fields, where: str) -> str:
    return f"{where}:{a_text(tool.get('type'), f'{where}.type')}"


def _is_ignored(tool: Fields) -> bool:
    """Whether the vendor runs the tool, so that no function can replace it."""
    kind = tool.get("type")
    if kind in ("function", "namespace"):
        return False
    if kind == "tool_search":  # not needed: the engine gets all tools at once
        return tool.get("execution") != "client"
    environment = tool.get("environment")
    if kind == "shell" and isinstance(environment, Mapping):
        return environment.get("type") != "local"
    return not isinstance(kind, str) or kind not in TOOL_KINDS


def _flat(name: str, namespace: str | None) -> str:
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def tool_fields(fields: Fields, tools: ResponseTools) -> Json:
    """Tools and their choice. Without tools, 'auto' and 'none' are left out, since engines refuse them then."""
    choice, functions = fields.get("tool_choice"), tools.functions
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        named = [tools.chosen(one, place) for one, place in objects(choice.get("tools"), "tool_choice.tools")]
        functions = [tool for tool in functions if tool["function"]["name"] in named]
        if not functions and None not in named:
            raise wrong("tool_choice", "allows no tool that is in 'tools'")
        choice = choice.get("mode", "auto")
    chosen = _choice(choice, tools)
    if functions:
        parallel = fields.get("parallel_tool_calls")
        return without_nones(tools=functions, tool_choice=chosen, parallel_tool_calls=parallel)
    if chosen in (None, "auto", "none"):
        return {}
    if tools.ignored:
        where, _, kind = tools.ignored[0].partition(":")
        raise unsupported(where, f"a tool of type {kind!r}")
    return {"tool_choice": chosen}


def _choice(choice: object, tools: ResponseTools) -> str | Json | None:
    if choice is None or isinstance(choice, str):
        return choice
    named = an_object(choice, "tool_choice")
    name = tools.chosen(named, "tool_choice")
    if name is None:
        raise unsupported("tool_choice", f"a choice of type {named.get('type')!r}")
    return {"type": "function", "function": {"name": name}}


def output_of(item: Fields, where: str, content: Callable[[object, str], str | list[Json]]) -> str | list[Json]:
    """The content of a tool's result. `content` reads a text or parts."""
    kind, output = item.get("type"), item.get("output")
    if kind == "tool_search_output":
        names = [str(tool.get("name")) for tool, _ in objects(item.get("tools"), f"{where}.tools")]
        return f"Tools: {', '.join(names) or 'none'}"
    if kind == "apply_patch_call_output":
        return "\n".join(str(text) for text in (item.get("status"), output) if text)
    if kind == "shell_call_output" and isinstance(output, list):
        return one_or_parts([{"type": "text", "text": _encoded(output)}])
    return content(content_of(output), f"{where}.output")
