"""The JSON that the emulated model answers with: examples that fit a request's schema, or the schema of a tool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, decode_body

MAX_LEVELS: Final = 32
"""How deep examples nest. Deeper values are null: only a recursive schema goes deeper."""
MAX_VALUES: Final = 10_000
"""How many values an example has. Further values are null: a schema that contains itself twice grows exponentially."""

ANY_OBJECT: Final = '{"text":"emulated"}'

_FORMATS: Final = {
    "date-time": "2026-01-01T00:00:00Z", "date": "2026-01-01", "time": "00:00:00Z", "email": "emulated@example.org",
    "uri": "https://example.org", "uuid": "00000000-0000-4000-8000-000000000000",
}  # fmt: skip


def example_json(schema: object) -> str:
    """A value with each required property, as JSON.

    The keywords that count: `$ref` within the schema, `const`, `enum`, `anyOf`, `oneOf`, `allOf`, `type`, `properties`,
    `required`, `items`, `prefixItems`, `minItems`, `format`, the lengths of strings and the bounds of numbers.
    """
    return msgspec.json.encode(_Examples(schema, iter(range(MAX_VALUES))).of(schema, 0)).decode()


class _Examples(msgspec.Struct):
    """Makes examples of one schema. References begin at its `root`. `values` is how many more values may be made."""

    root: object
    values: Iterator[int]

    def of(self, schema: object, level: int) -> Any:
        if level > MAX_LEVELS or next(self.values, None) is None:
            return None
        if not isinstance(schema, Mapping):
            return {}
        schema = self._whole(schema)
        if "const" in schema:
            return schema["const"]
        if choices := _some(schema.get("enum")):
            return choices[0]
        kind = schema.get("type")
        if isinstance(kind, list):  # any of them, as in ["string", "null"]
            kind = kind[0] if kind else None
        return self._of_type(kind, schema, level)

    def _of_type(self, kind: object, schema: Mapping[str, Any], level: int) -> Any:
        if isinstance(kind, str) and kind in _SIMPLE:
            return _SIMPLE[kind](schema)
        if kind == "array":
            first, least = _some(schema.get("prefixItems")), schema.get("minItems")
            count = min(least, 100) if isinstance(least, int) else 0
            schemas = [*first[:count], *[schema.get("items")] * (count - len(first))]
            return [self.of(item, level + 1) for item in schemas]
        names = [name for name in _some(schema.get("required")) if isinstance(name, str)]
        return {name: self.of(_table(schema.get("properties")).get(name), level + 1) for name in names}

    def _whole(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema with what it refers to, and with the first of its choices."""
        for _ in range(MAX_LEVELS):
            parts = [self._referred(schema.get("$ref")), *_some(schema.get("allOf"))]
            parts += [part for key in ("anyOf", "oneOf") for part in _some(schema.get(key))[:1]]
            schema = {key: schema[key] for key in schema if key not in ("$ref", "anyOf", "oneOf", "allOf")}
            parts = [part for part in parts if isinstance(part, Mapping)]
            for part in parts:
                properties = {**_table(part.get("properties")), **_table(schema.get("properties"))}
                required = [*_some(part.get("required")), *_some(schema.get("required"))]
                schema = {**part, **schema, "properties": properties, "required": required}
            if not parts:
                break
        return schema

    def _referred(self, reference: object) -> object:
        """The schema that a reference such as `#/$defs/Name` names; None for any other reference."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self.root
        for key in reference.split("/")[1:]:
            found = _table(found).get(key.replace("~1", "/").replace("~0", "~"))
        return found


def _some(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(schema: Mapping[str, Any]) -> str:
    form, least, most = (schema.get(key) for key in ("format", "minLength", "maxLength"))
    if isinstance(form, str) and form in _FORMATS:
        return _FORMATS[form]
    text = "emulated".ljust(min(least, 10_000) if isinstance(least, int) else 0, "d")
    return text[:most] if isinstance(most, int) and most >= 0 else text


def _number(schema: Mapping[str, Any]) -> float:
    """1, or else a number at the edge of the bounds; a multiple of `multipleOf` if there is one."""
    least, most, above, below, step = (
        value if isinstance(value := schema.get(key), int | float) and not isinstance(value, bool) else None
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    )
    by = step if step is not None and step > 0 else 1
    number: float = by
    if least is not None and number < least:
        number = -(-least // by) * by
    if above is not None and number <= above:
        number = (above // by + 1) * by
    if most is not None and number > most:
        number = most // by * by
    if below is not None and number >= below:
        number = (-(-below // by) - 1) * by
    return number


_SIMPLE: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    "string": _text,
    "integer": lambda schema: int(_number(schema)),
    "number": lambda schema: float(_number(schema)),
    "boolean": lambda _: True,
    "null": lambda _: None,
}


class _Wishes(msgspec.Struct, frozen=True):
    """The field of a body that asks for a form of the text."""

    response_format: Any = None


_DECODER = msgspec.json.Decoder(_Wishes)


def requested_json(body: bytes) -> str | None:
    """JSON that fits OpenAI's `response_format`; None if any text will do. Raises CallerError for a malformed one."""
    wanted = decode_body(body, _DECODER).response_format
    kind = _table(wanted).get("type")
    if wanted is None or kind in ("text", "structural_tag"):
        return None
    if kind == "json_object":
        return ANY_OBJECT
    schema = _table(wanted.get("json_schema")).get("schema") if kind == "json_schema" else None
    if not isinstance(schema, Mapping):
        raise CallerError(
            "'response_format.type' must be 'text', 'json_object', or 'json_schema' with a 'json_schema.schema'",
            param="response_format",
        )
    return example_json(schema)


def called_tool(request: ChatRequest) -> dict[str, Any] | None:
    """The tool that `tool_choice` names, or the first tool for `required`; None without such a choice."""
    choice, tools = request.tool_choice, request.tools or []
    if choice is None or choice in ("auto", "none"):
        return None
    wanted = _name(tools[0]) if choice == "required" and tools else _name(choice)
    for tool in tools:
        if wanted is not None and _name(tool) == wanted:
            return tool
    raise CallerError(f"'tool_choice' names no function that is in 'tools': {choice!r}", param="tool_choice")


def example_arguments(tool: dict[str, Any]) -> str:
    """Arguments as JSON that fit the tool's schema."""
    return example_json(tool["function"].get("parameters"))


def _name(value: object) -> str | None:
    """The function's name in a tool or in a `tool_choice`."""
    name = _table(_table(value).get("function")).get("name")
    return name if isinstance(name, str) else None
