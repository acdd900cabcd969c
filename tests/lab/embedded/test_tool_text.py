"""The emulated model's tool calls: which tool, and arguments for whatever schema a caller sends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest
from plait.lab.embedded.example_json import called_tool, example_arguments

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(("object", "array", "string", "enum", "x")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("type", "enum", "properties", "required", "x")), inner, max_size=5)
    ),
    max_leaves=12,
)


def function(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def request(tools: Any, choice: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice=choice)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, {}),
        ({"properties": {"a": {"type": "boolean"}}, "required": ["a", "b"]}, {"a": True, "b": {}}),
        ({"properties": {"a": {"type": "array"}}, "required": ["a"]}, {"a": []}),
        ({"properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}, {"a": "x"}),
        ({"properties": {"a": {"type": "string", "enum": []}}, "required": ["a"]}, {"a": "emulated"}),
        ({"properties": {"a": {"type": ["number", "null"]}}, "required": ["a"]}, {"a": 1.0}),
        (
            {"properties": {"a": {"properties": {"b": {"type": "null"}}, "required": ["b"]}}, "required": ["a"]},
            {"a": {"b": None}},
        ),
    ],
)
def test_arguments_have_a_value_for_every_required_property(schema: Any, expected: Any) -> None:
    assert json.loads(example_arguments(function("f", schema))) == expected


@given(JSON)
def test_no_schema_is_too_odd(schema: Any) -> None:
    json.loads(example_arguments(function("f", schema)))


def test_the_tool_that_is_asked_for() -> None:
    tools = [function("a"), function("b")]
    assert called_tool(request(tools, "required")) == tools[0]
    assert called_tool(request(tools, {"type": "function", "function": {"name": "b"}})) == tools[1]
    for choice in (None, "auto", "none"):
        assert called_tool(request(tools, choice)) is None


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([], "required"),
        (None, "required"),
        ([function("a")], "a"),
        ([function("a")], {"function": {"name": "b"}}),
        ([function("a")], {"function": "a"}),
        ([function("a")], {}),
        ([{"function": "a"}], {"function": {"name": "a"}}),
        ([{"type": "function"}], "required"),
        ([{"function": {"description": "nameless"}}], "required"),
    ],
)
def test_a_choice_that_names_no_tool_is_the_callers_error(tools: Any, choice: Any) -> None:
    with pytest.raises(CallerError) as caught:
        called_tool(request(tools, choice))
    assert caught.value.param == "tool_choice"
