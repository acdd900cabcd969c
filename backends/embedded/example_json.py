"""The JSON that the emulated model answers with: examples that fit a request's schema, or the schema of a tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, decode_body

MAX_LEVELS: Final = 32
"""Schemas in each other. Behind it stands null: only a schema that needs itself goes on for ever."""
MAX_VALUES: Final = 10_000
"""Behind them stands null too: few levels of a schema that needs itself twice are more values than any memory holds."""

_FORMATS: Final = {
    "date-time": "2026-01-01T00:00:00Z", "date": "2026-01-01", "time": "00:00:00Z", "duration": "PT1S",
    "email": "emulated@example.org", "hostname": "example.org", "ipv4": "192.0.2.1", "ipv6": "2001:db8::1",
    "uri": "https://example.org", "uuid": "00000000-0000-4000-8000-000000000000",
}  # fmt: skip
_TEXT: Final = "emulated"
_OTHER_SCHEMAS: Final = frozenset({"$ref", "anyOf", "oneOf", "allOf"})


def example_json(schema: object) -> str:
    """The shortest value that is easily made, as JSON. It has every required property.

    What a schema says beyond the usual keywords is ignored.
    Read are `$ref` within the schema, `const`, `enum`, `anyOf`, `oneOf`, `allOf`, `type`, `properties`, `required`,
    `items`, `prefixItems`, `minItems`, `format`, the lengths of strings and the bounds of numbers.
    """
    return msgspec.json.encode(_Examples(schema).of(schema, 0)).decode()


class _Examples:
    """The examples of one schema. `root` is where references begin."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._values = 0

    def of(self, schema: object, level: int) -> Any:
        self._values += 1
        if level > MAX_LEVELS or self._values > MAX_VALUES:
            return None
        if not isinstance(schema, Mapping):
            return {}
        schema = self._whole(schema)
        if "const" in schema:
            return schema["const"]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return schema["enum"][0]
        kind = schema.get("type")
        if isinstance(kind, list):  # any of them, as in ["string", "null"]
            kind = kind[0] if kind else None
        return self._of_type(kind, schema, level)

    def _of_type(self, kind: object, schema: Mapping[str, Any], level: int) -> Any:
        if isinstance(kind, str) and kind in _SIMPLE:
            return _SIMPLE[kind](schema)
        if kind == "array":
            return self._array(schema, level)
        properties, required = schema.get("properties"), schema.get("required")
        schemas = properties if isinstance(properties, Mapping) else {}
        names = required if isinstance(required, list) else []
        return {name: self.of(schemas.get(name), level + 1) for name in names if isinstance(name, str)}

    def _whole(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema with what it refers to, and with the first of its choices."""
        for _ in range(MAX_LEVELS):
            parts = [self._referred(schema.get("$ref")), *_some(schema.get("allOf"))]
            parts += [options[0] for key in ("anyOf", "oneOf") if (options := _some(schema.get(key)))]
            named = [part for part in parts if isinstance(part, Mapping)]
            if not named:
                break
            schema = {key: value for key, value in schema.items() if key not in _OTHER_SCHEMAS}
            for part in named:
                schema = _merged(schema, part)
        return schema

    def _referred(self, reference: object) -> object:
        """What a reference such as `#/$defs/Name` names; None for any other."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._root
        for key in reference.removeprefix("#").split("/")[1:]:
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found

    def _array(self, schema: Mapping[str, Any], level: int) -> list[Any]:
        first, least = _some(schema.get("prefixItems")), schema.get("minItems")
        count = min(least, 100) if isinstance(least, int) else 0
        schemas = [*first[:count], *[schema.get("items")] * (count - len(first))]
        return [self.of(item, level + 1) for item in schemas]


def _some(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _merged(schema: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Both: the properties and the required names of either; otherwise what the first one says."""
    merged = {**part, **schema}
    if isinstance(schema.get("properties"), Mapping) and isinstance(part.get("properties"), Mapping):
        merged["properties"] = {**part["properties"], **schema["properties"]}
    if isinstance(schema.get("required"), list) and isinstance(part.get("required"), list):
        merged["required"] = [*part["required"], *schema["required"]]
    return merged


def _text(schema: Mapping[str, Any]) -> str:
    form, least, most = (schema.get(key) for key in ("format", "minLength", "maxLength"))
    if isinstance(form, str) and form in _FORMATS:
        return _FORMATS[form]
    text = _TEXT
    if isinstance(least, int) and least > len(text):
        text = (text * (min(least, 10_000) // len(text) + 1))[: min(least, 10_000)]
    return text[:most] if isinstance(most, int) and most >= 0 else text


def _number(schema: Mapping[str, Any]) -> float:
    """1, or the number next to it that keeps to the bounds and is a multiple of what it has to be."""
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


ANY_OBJECT: Final = '{"text":"emulated"}'


class _Wishes(msgspec.Struct, frozen=True):
    """The fields of a body that say what its text has to be. `guided_json` is older than `structured_outputs`."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None


_DECODER = msgspec.json.Decoder(_Wishes)


def requested_json(body: bytes) -> str | None:
    """JSON that fits the schema of OpenAI's `response_format` or of vLLM's own fields; None if any text will do.

    Raises CallerError for a malformed wish.
    """
    wishes = decode_body(body, _DECODER)
    structured = wishes.structured_outputs
    schema = structured.get("json") if isinstance(structured, Mapping) else None
    schema = wishes.guided_json if schema is None else schema
    if schema is not None:
        return example_json(_decoded(schema))
    return None if wishes.response_format is None else _of_format(wishes.response_format)


def _of_format(wanted: object) -> str | None:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind in ("text", "structural_tag"):
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise CallerError(
            "'response_format.type' must be 'text', 'json_object' or 'json_schema'", param="response_format"
        )
    assert isinstance(wanted, Mapping)
    named = wanted.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise CallerError("'response_format.json_schema' must be an object with a 'schema'", param="response_format")
    return example_json(schema)


def _decoded(schema: object) -> object:
    """The schema. In vLLM's own fields it may also be a string with JSON."""
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema)
    except msgspec.DecodeError as error:
        raise CallerError(
            f"'structured_outputs.json' is not valid JSON: {error}", param="structured_outputs"
        ) from error


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
