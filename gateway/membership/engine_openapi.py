"""What an engine's OpenAPI document says: its routes, and the fields of their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec


class OpenApi(NamedTuple):
    """An engine's routes. `fields` has the names in the body of each POST whose body is described."""

    paths: frozenset[str]
    fields: Mapping[str, frozenset[str]]


class _Schema(msgspec.Struct):
    ref: str | None = msgspec.field(default=None, name="$ref")
    properties: dict[str, Any] | None = None


class _Components(msgspec.Struct):
    schemas: dict[str, msgspec.Raw] = {}


class _Document(msgspec.Struct):
    paths: dict[str, msgspec.Raw]
    components: _Components | None = None


class _Content(msgspec.Struct):
    content: dict[str, dict[str, Any]]


class _Post(msgspec.Struct):
    requestBody: _Content  # noqa: N815 - OpenAPI's name


class _Path(msgspec.Struct):
    post: _Post


def read_openapi(document: bytes | bytearray) -> OpenApi:
    """Read a document. Raises `msgspec.DecodeError` for one without paths."""
    read = msgspec.json.decode(document, type=_Document)
    schemas = {} if read.components is None else read.components.schemas
    found = {path: _fields(item, schemas) for path, item in read.paths.items()}
    return OpenApi(frozenset(read.paths), {path: fields for path, fields in found.items() if fields})


def _fields(item: msgspec.Raw, schemas: Mapping[str, msgspec.Raw]) -> frozenset[str]:
    try:
        body = msgspec.json.decode(item, type=_Path).post.requestBody.content["application/json"]
        schema = msgspec.convert(body.get("schema"), _Schema)
        if schema.ref is not None:
            schema = msgspec.json.decode(schemas[schema.ref.rpartition("/")[2]], type=_Schema)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError):
        return frozenset()
    return frozenset(schema.properties or ())
