from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from plait.gateway.membership.engine_openapi import read_openapi

BODY = {"properties": {"model": {}, "cache_salt": {"anyOf": [{"type": "string"}]}}}


def post(schema: Any) -> dict[str, Any]:
    return {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (post({"$ref": "#/components/schemas/Body"}), {"model", "cache_salt"}),
        (post(BODY), {"model", "cache_salt"}),
        (post({"type": "object", "additionalProperties": True}), None),
        (post({"$ref": "#/components/schemas/Other"}), None),
        (post(None), None),
        ({"post": {}}, None),
        ({"get": {}}, None),
        (None, None),
    ],
)
def test_the_fields_of_a_body(path: Any, fields: set[str] | None) -> None:
    read = read_openapi(json.dumps({"paths": {"/a": path}, "components": {"schemas": {"Body": BODY}}}).encode())
    assert read.paths == {"/a"}
    assert read.fields == ({} if fields is None else {"/a": fields})


def test_a_document_needs_paths_only() -> None:
    assert read_openapi(b'{"paths": {"/a": {"post": {}}}}').paths == {"/a"}
    with pytest.raises(msgspec.DecodeError):
        read_openapi(b"{}")
