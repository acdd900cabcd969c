"""What `/v1/messages` asks of chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter

from plait.backends.errors import CallerError
from plait.backends.translation.translation import TRANSLATIONS

ANTHROPIC = TRANSLATIONS["/v1/messages"]
MESSAGES: TypeAdapter[Any] = TypeAdapter(list[ChatCompletionMessageParam])
HI = {"role": "user", "content": "hi"}
LOOK = {
    "name": "look",
    "description": "looks",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}

WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def chat(**fields: Any) -> dict[str, Any]:
    return ANTHROPIC.to_chat({"model": "m", "max_tokens": 9, "messages": [HI], **fields})


def messages(*given: Any, **fields: Any) -> list[Any]:
    made: list[Any] = chat(messages=list(given), **fields)["messages"]
    MESSAGES.validate_python(made)
    return made


def test_a_simple_request() -> None:
    assert chat() == {"model": "m", "max_tokens": 9, "messages": [HI]}


def test_the_system_prompt_is_one_text_without_the_line_that_differs_in_each_call() -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
        {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "be kind"},
    ]
    assert messages(HI, system=blocks)[0] == {"role": "system", "content": "be brief\nbe kind"}
    assert messages(HI, system="be brief")[0] == {"role": "system", "content": "be brief"}
    assert messages(HI, system="") == messages(HI, system=blocks[:1]) == [HI]


def test_pictures() -> None:
    sources = [
        {"type": "base64", "media_type": "image/png", "data": "AA=="},
        {"type": "url", "url": "https://example.org/cat.png"},
    ]
    [message] = messages(
        {
            "role": "user",
            "content": [{"type": "text", "text": "this"}, *({"type": "image", "source": s} for s in sources)],
        }
    )
    assert message["content"] == [
        {"type": "text", "text": "this"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
    ]


def test_an_agents_turns() -> None:
    made = messages(
        HI,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}},
            {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "a cat"},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True,
             "content": [{"type": "text", "text": "it is dark"}]},
            {"type": "text", "text": "and now?"},
        ]},
    )  # fmt: skip
    assistant, first, second, user = made[1:]
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
    assert [json.loads(call["function"]["arguments"]) for call in assistant["tool_calls"]] == [{"at": "it"}, {}]
    assert [call["id"] for call in assistant["tool_calls"]] == ["t1", "t2"]
    assert first == {"role": "tool", "tool_call_id": "t1", "content": "a cat"}
    assert second == {"role": "tool", "tool_call_id": "t2", "content": "Error:\nit is dark"}
    assert user == {"role": "user", "content": "and now?"}


def test_a_tool_without_a_result_and_a_message_with_results_only() -> None:
    [message] = messages({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]})
    assert message == {"role": "tool", "tool_call_id": "t", "content": ""}


def test_a_picture_of_a_tool_that_failed() -> None:
    source = {"type": "url", "url": "https://example.org/cat.png"}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "is_error": True,
        "content": [{"type": "image", "source": source}],
    }
    [message] = chat(messages=[{"role": "user", "content": [result]}])["messages"]
    assert message["content"] == [
        {"type": "text", "text": "Error:"},
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
    ]


def test_the_model_continues_its_own_last_message() -> None:
    translated = chat(messages=[HI, {"role": "assistant", "content": "It is"}])
    assert (translated["add_generation_prompt"], translated["continue_final_message"]) == (False, True)
    assert "continue_final_message" not in chat()


def test_tools_and_their_choice() -> None:
    translated = chat(tools=[LOOK, {**LOOK, "type": "custom"}], tool_choice={"type": "any"})
    function = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
    assert translated["tools"] == [{"type": "function", "function": function}] * 2
    assert translated["tool_choice"] == "required"
    named = chat(tools=[LOOK], tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert named["parallel_tool_calls"] is False
    assert chat(tools=[LOOK], tool_choice={"type": "auto"})["tool_choice"] == "auto"
    assert chat(tools=[LOOK], tool_choice={"type": "none"})["tool_choice"] == "none"
    assert chat(tools=[], tool_choice={"type": "auto"}) == chat()


def test_sampling_and_a_stream() -> None:
    translated = chat(stop_sequences=["a"], metadata={"user_id": "u"}, temperature=0.5, top_p=0.9, top_k=3, stream=True)
    assert translated == chat() | {
        "stop": ["a"], "user": "u", "temperature": 0.5, "top_p": 0.9, "top_k": 3,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert chat(max_tokens=5.0)["max_tokens"] == 5


def test_thinking_and_formats() -> None:
    assert chat(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    enabled = chat(thinking={"type": "enabled", "budget_tokens": 2_000}, chat_template_kwargs={"a": 1})
    assert enabled["chat_template_kwargs"] == {"enable_thinking": True, "a": 1}
    assert enabled["thinking_token_budget"] == 2_000
    assert chat(thinking={"type": "adaptive"}) == chat()
    form = {"type": "json_schema", "schema": {"type": "object"}}
    translated = chat(output_config={"effort": "high", "format": form})
    assert translated["reasoning_effort"] == "high"
    assert translated["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert chat(output_format=form)["response_format"] == translated["response_format"]


def test_fields_of_anthropics_own_are_left_out_and_others_stay() -> None:
    assert chat(service_tier="auto", cache_control={"type": "ephemeral"}, context_management={}, betas=["b"]) == chat()
    assert chat(plait={}, cache_salt="s") == chat() | {"plait": {}, "cache_salt": "s"}


def test_a_count_needs_no_limit() -> None:
    counted = ANTHROPIC.to_count({"model": "m", "system": "s", "messages": [HI], "tools": [LOOK]})
    assert counted["messages"] == [{"role": "system", "content": "s"}, HI]
    assert len(counted["tools"]) == 1
    assert "max_tokens" not in counted
    assert json.loads(ANTHROPIC.counted(7)) == {"input_tokens": 7}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"system": 3}, "system"),
        ({"tools": [WEB], "tool_choice": {"type": "any"}}, "tools[0]"),
        ({"tools": [LOOK, WEB], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [LOOK], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"container": "c"}, "container"),
        ({"stop_sequences": "a"}, "stop_sequences"),
    ],
)
def test_what_it_refuses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(CallerError) as refusal:
        chat(**fields)
    assert (refusal.value.status, refusal.value.param) == (400, param)
