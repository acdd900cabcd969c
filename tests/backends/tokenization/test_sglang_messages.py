"""SGLang's form of messages and tools. `make e2e-sglang` compares it with SGLang's own."""

from __future__ import annotations

from typing import Any

import pytest

from plait.backends.errors import UnsupportedError
from plait.backends.tokenization.sglang_messages import sglang_messages, sglang_tools

STRINGS = "{% for message in messages %}{{ message.content }}{% endfor %}"
PARTS = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
TWO = [{"type": "text", "text": "a", "x": 1}, {"type": "input_text", "text": "b"}]


def prepared(message: dict[str, Any], template: str = STRINGS) -> dict[str, Any]:
    [found] = sglang_messages([message], template)
    return found


def test_parts_are_joined_by_a_space_unless_the_template_loops_over_them() -> None:
    assert prepared({"role": "user", "content": TWO})["content"] == "a b"
    parts = prepared({"role": "user", "content": TWO}, PARTS)["content"]
    assert parts == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prepared({"role": "tool", "content": TWO}, PARTS)["content"] == "a b"


def test_a_message_keeps_the_keys_of_its_role() -> None:
    assert prepared({"role": "user", "content": "x", "name": "bob"}) == {"role": "user", "content": "x"}
    given = {"role": "assistant", "content": None, "reasoning": "r", "reasoning_content": "q", "name": None}
    assert prepared(given) == {"role": "assistant", "content": "", "reasoning_content": "q"}
    assert prepared({"role": "developer", "content": "d"})["role"] == "developer"


def test_arguments_of_calls_become_objects() -> None:
    call = {"id": "1", "x": 2, "function": {"arguments": '{"a": 1}', "name": "f"}}
    assert prepared({"role": "assistant", "content": "", "tool_calls": [call]})["tool_calls"] == [
        {"id": "1", "index": None, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "critic", "content": "x"},
        {"content": "x"},
        "x",
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "content": "", "tool_calls": ["f"]},
        *(
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
            for arguments in ('{"x": 18446744073709551616}', '{"x": NaN}', '{"x": 1e400}')
        ),
    ],
)
def test_what_sglang_would_refuse_is_left_to_it(message: Any) -> None:
    with pytest.raises(UnsupportedError):
        sglang_messages([message], STRINGS)


def test_tools_keep_the_order_of_their_keys() -> None:
    given = [{"x": 1, "function": {"parameters": {}, "y": 2, "name": "f", "strict": True}}]
    assert sglang_tools(given) == [
        {
            "type": "function",
            "function": {"parameters": {}, "name": "f", "strict": True, "description": None},
            "defer_loading": None,
        }
    ]
    assert list(sglang_tools(given)[0]["function"]) == ["parameters", "name", "strict", "description"]  # type: ignore[index]
    assert sglang_tools(None) is None
    for refused in ({}, {"name": "f", "strict": 1}):
        with pytest.raises(UnsupportedError, match="tools\\[0\\]"):
            sglang_tools([{"function": refused}])
