"""Any history makes a chat that engines take: at random, of both APIs, with what models and tools get wrong."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.translation.chat_history import arguments_of
from plait.backends.translation.translation import TRANSLATIONS
from tests.backends.translation.strict_engines import check_sglang_0_5_13, check_vllm_0_25

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = VALUES | st.sampled_from(["", "null", "[]", '""', '"{}"', '{"cmd": "ls', '{"cmd": "ls"}', "{} {}", "NaN"])
IDS = st.sampled_from(["c1", "c2", "c3"])
PICTURE = "data:image/png;base64,AA=="


def of(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {name: value if isinstance(value, st.SearchStrategy) else st.just(value) for name, value in fields.items()}
    )


RESPONSE_PARTS = st.lists(of(type="input_text", text=TEXTS) | of(type="input_image", image_url=PICTURE), max_size=2)
SAID = VALUES | st.lists(of(type=st.sampled_from(["output_text", "refusal"]), text=VALUES, refusal=VALUES), max_size=2)
ITEMS = st.lists(
    st.one_of(
        of(type="message", role=st.sampled_from(["user", "system", "developer"]), content=TEXTS | RESPONSE_PARTS),
        of(type="message", role="assistant", content=SAID),
        of(type="reasoning", summary=st.lists(of(type="summary_text", text=TEXTS), max_size=1)),
        of(type="reasoning", content=st.lists(of(type="reasoning_text", text=TEXTS), max_size=1)),
        of(type="function_call", call_id=IDS, name="look", arguments=ARGUMENTS),
        of(type="custom_tool_call", call_id=IDS, name="edit", input=VALUES),
        of(type="local_shell_call", call_id=IDS, action=VALUES),
        of(type="function_call_output", call_id=IDS, output=VALUES | RESPONSE_PARTS),
        of(type="web_search_call", id="w", status=TEXTS),
    ),
    min_size=1,
    max_size=8,
).filter(lambda items: any(item["type"] != "reasoning" for item in items))
IMAGE = of(type="image", source={"type": "base64", "media_type": "image/png", "data": "AA=="})
MESSAGE_PARTS = st.lists(of(type="text", text=TEXTS) | IMAGE, max_size=2)
USED = of(type="tool_use", id=IDS, name="look", input=ARGUMENTS)
THOUGHT = of(type="thinking", thinking=VALUES, signature=TEXTS) | of(type="redacted_thinking", data=TEXTS)
RESULT = of(type="tool_result", tool_use_id=IDS, content=VALUES | MESSAGE_PARTS, is_error=st.booleans())
MESSAGES = st.lists(
    st.one_of(
        of(role="user", content=TEXTS | MESSAGE_PARTS | st.lists(RESULT, min_size=1, max_size=2)),
        of(role="assistant", content=VALUES | st.lists(USED | THOUGHT | of(type="text", text=VALUES), max_size=4)),
        of(role="system", content=TEXTS),
    ),
    min_size=1,
    max_size=8,
).filter(lambda messages: any(message["role"] != "system" for message in messages))
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}, {"type": "custom", "name": "edit"}]
MESSAGE_TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]


def check(chat: dict[str, Any]) -> None:
    check_vllm_0_25(chat)
    check_sglang_0_5_13(chat)
    system, *said = [message["role"] for message in chat["messages"]]
    assert "system" not in said
    for role, following in zip([system, *said], said, strict=False):
        assert role == "tool" or role != following, "neighbours of one role"


@settings(max_examples=500, deadline=None)
@given(ITEMS, st.none() | TEXTS)
def test_of_a_response(items: list[dict[str, Any]], instructions: str | None) -> None:
    fields = {"model": "m", "input": items, "instructions": instructions, "tools": TOOLS, "temperature": None}
    check(TRANSLATIONS["/v1/responses"].to_chat(fields))


@settings(max_examples=500, deadline=None)
@given(MESSAGES, st.none() | TEXTS)
def test_of_a_message(messages: list[dict[str, Any]], system: str | None) -> None:
    fields = {"model": "m", "max_tokens": 9, "messages": messages, "system": system, "tools": MESSAGE_TOOLS}
    check(TRANSLATIONS["/v1/messages"].to_chat(fields))


def test_arguments_that_are_an_object_stay_as_they_are() -> None:
    assert arguments_of('{ "a":1.0}') == '{ "a":1.0}'
    assert arguments_of({"a": 1}) == '{"a":1}'
    assert arguments_of('"{\\"a\\": 1}"') == '{"a": 1}', "encoded twice"
    nothing: list[object] = ["", " ", "null", "{}", "[]", '""', None, {}, []]
    assert set(map(arguments_of, nothing)) == {"{}"}
    assert arguments_of('{"cmd": "ls') == '{"arguments":"{\\"cmd\\": \\"ls"}'
    assert arguments_of("[1]") == arguments_of([1]) == '{"arguments":[1]}'
