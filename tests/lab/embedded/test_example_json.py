"""The emulated model's JSON fits the schemas that clients make, pydantic's above all."""

from __future__ import annotations

import json
from datetime import date
from enum import Enum
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from plait.lab.embedded.example_json import MAX_LEVELS, MAX_VALUES, example_json


class Kind(Enum):
    CAT = "cat"
    DOG = "dog"


class Owner(BaseModel):
    name: str = Field(min_length=12, max_length=14)
    short: str = Field(max_length=3)
    born: date
    key: UUID
    email: str | None


class Animal(BaseModel):
    kind: Kind
    sort: Literal["animal"]
    owner: Owner | None
    owners: list[Owner] = Field(min_length=2)
    pair: tuple[int, str]
    age: int = Field(ge=3, le=9)
    weight: float = Field(gt=1, lt=1_000)
    cold: float = Field(lt=0)
    even: int = Field(multiple_of=2, gt=4)
    tags: dict[str, int]
    children: list[Animal]
    nickname: str = "none"


def test_a_models_schema() -> None:
    animal = Animal.model_validate_json(example_json(Animal.model_json_schema()))
    assert (animal.kind, animal.age, animal.even, animal.children, animal.nickname) == (Kind.CAT, 3, 6, [], "none")
    assert (len(animal.owners[0].name), animal.owners[0].short) == (12, "emu")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer", "maximum": -3}, -3),
        ({"type": "integer", "exclusiveMaximum": 0}, -1),
        ({"type": "integer", "exclusiveMinimum": 4, "multipleOf": 3}, 6),
        ({"type": "number", "minimum": 2.5}, 3.0),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"required": ["c"]}], "properties": {"c": {"type": "null"}},
          "$defs": {"a": {"properties": {"b": {"const": 5}}, "required": ["b"]}}}, {"b": 5, "c": None}),
        ({"oneOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, [None, None]),
        ({"$ref": "#/nothing"}, {}),
        ({"$ref": "#"}, {}),
    ],
)  # fmt: skip
def test_keywords(schema: Any, value: Any) -> None:
    assert json.loads(example_json(schema)) == value


def test_a_schema_that_needs_itself_ends() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    assert example_json(schema).count("{") == MAX_LEVELS + 1


def test_a_schema_that_needs_itself_twice_ends_soon() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}, "required": ["a", "b"]}
    assert MAX_VALUES < example_json(schema).count(":") < 2 * MAX_VALUES + MAX_LEVELS


KEYWORDS = ("type", "enum", "properties", "required", "items", "minItems", "anyOf", "allOf", "$ref", "minimum",
            "multipleOf", "exclusiveMaximum", "minLength", "maxLength", "format", "const", "prefixItems")  # fmt: skip
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from(("object", "array", "string", "number", "#", "#/a", "date")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=6),
    max_leaves=16,
)


@given(ODD)
def test_no_schema_is_too_odd(schema: Any) -> None:
    json.loads(example_json(schema))
