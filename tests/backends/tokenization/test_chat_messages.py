from typing import Any

import pytest

from plait.backends.errors import CallerError, UnsupportedError
from plait.backends.tokenization.chat_messages import template_messages, template_tools

STRINGS = "{% for message in messages %}{{ message.content }}{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
DEVELOPER = STRINGS + "{# #}{{ 'developer' }}"


def one(message: dict[str, Any], template: str = STRINGS) -> dict[str, Any]:
    [prepared] = template_messages([message], template)
    return prepared


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ("a", "a"),
        (["a", {"type": "text", "text": ""}, {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "no"}, {"type": "text", "text": None}], "no"),
    ],
)
def test_content_is_one_string(content: object, text: str) -> None:
    assert one({"role": "user", "content": content}) == {"role": "user", "content": text}


def test_content_is_parts_for_a_template_that_loops_over_it() -> None:
    part = {"type": "text", "text": "a"}
    assert one({"role": "user", "content": "a"}, PARTS) == {"role": "user", "content": [part]}
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert one({"role": "user", "content": [marked]}, PARTS)["content"] == [marked]
    assert one({"role": "user", "content": None}, PARTS)["content"] == []
    assert one({"role": "tool", "content": [part, part]}, PARTS)["content"] == "a\na"


def test_only_the_keys_that_vllm_keeps_reach_a_template() -> None:
    extra = {"refusal": None, "audio": None, "name": "Ada", "tool_call_id": "1", "reasoning": "hm", "tool_calls": None}
    assert one({"role": "user", "content": "a", **extra}) == {"role": "user", "content": "a", "name": "Ada"}
    assert one({"role": "tool", "content": "a", **extra})["tool_call_id"] == "1"
    assert one({"role": "assistant", "content": "a", "tool_calls": []}) == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_goes_by_both_its_names(key: str) -> None:
    prepared = one({"role": "assistant", "content": "a", key: "hm"})
    assert prepared == {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("{broken", {}), ("[1]", {}), ("42", {})],
)
def test_arguments_become_an_object_and_the_request_stays_as_it_was(arguments: object, parsed: dict[str, int]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    prepared = one({"role": "assistant", "tool_calls": [call]})
    assert prepared["tool_calls"] == [{**call, "function": {"name": "f", "arguments": parsed}}]
    assert call["function"] == {"name": "f", "arguments": arguments}


def test_a_developer_message_is_a_system_message_where_the_template_knows_no_developer() -> None:
    developer = {"role": "developer", "content": "d"}
    assert one(developer) == {"role": "system", "content": "d"}
    assert one(developer, DEVELOPER)["role"] == "developer"
    user = {"role": "user", "content": "u"}
    system = {"role": "system", "content": "s"}
    merged = [{"role": "system", "content": "s\n\nd"}, user]
    assert template_messages([system, user, developer], STRINGS) == merged
    assert template_messages([system, system, user], STRINGS) == [system, system, user]


def test_a_billing_line_is_dropped_from_the_system_prompt() -> None:
    line = "x-anthropic-billing-header: cch=1a2b;"
    assert one({"role": "system", "content": f"{line}\nBe kind."})["content"] == "Be kind."
    assert one({"role": "system", "content": [line, "Be kind."]})["content"] == "Be kind."
    assert one({"role": "user", "content": line})["content"] == line


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": "f()"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": ["f()"]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls"),
    ],
)
def test_a_malformed_message_is_the_callers_error(message: Any, param: str) -> None:
    with pytest.raises(CallerError) as caught:
        template_messages([message], STRINGS)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", ["text"]])
def test_content_that_is_not_text_is_unsupported(kind: object) -> None:
    with pytest.raises(UnsupportedError, match="only text"):
        one({"role": "user", "content": [{"type": kind}]})


def test_tools_have_vllms_keys_in_vllms_order() -> None:
    assert template_tools(None) is None
    function = {"parameters": {"type": "object"}, "name": "f", "returns": {}, "strict": True}
    prepared = template_tools([{"function": function, "type": "function", "x": 1}])
    assert repr(prepared) == repr(
        [
            {
                "type": "function",
                "function": {"name": "f", "description": None, "parameters": {"type": "object"}, "strict": True},
            }
        ]
    )


@pytest.mark.parametrize("tool", ["f", {"type": "custom"}, {"function": {"description": "nameless"}}])
def test_a_tool_without_a_name_is_the_callers_error(tool: Any) -> None:
    with pytest.raises(CallerError, match=r"tools\[0\]"):
        template_tools([tool])
