"""The JSON that a request wants as the text of its completion: OpenAI's `response_format`, and vLLM's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from plait.backends.embedded.example_json import example_json
from plait.backends.errors import CallerError
from plait.backends.protocol.openai import decode_body

ANY_OBJECT: Final = '{"text":"emulated"}'


class _Wishes(msgspec.Struct, frozen=True):
    """The fields of a body that say what its text has to be. `guided_json` is older than `structured_outputs`."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None


_DECODER = msgspec.json.Decoder(_Wishes)


def requested_json(body: bytes) -> str | None:
    """JSON that fits the request's schema; None if it wants any text. Raises CallerError for a malformed wish."""
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
