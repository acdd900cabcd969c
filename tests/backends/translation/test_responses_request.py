"""What `/v1/responses` asks of chat completions."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter

from plait.backends.errors import CallerError
from plait.backends.translation.translation import TRANSLATIONS

RESPONSES = TRANSLATIONS["/v1/responses"]
MESSAGES: TypeAdapter[Any] = TypeAdapter(list[ChatCompletionMessageParam])
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
WAIT = {"type": "function", "name": "wait", "description": "waits", "parameters": {"type": "object"}, "strict": False}


def chat(**fields: Any) -> dict[str, Any]:
    before = repr(fields)
    translated = RESPONSES.to_chat({"model": "m", "input": "hi", **fields})
    assert repr(fields) == before
    return translated


def messages(*items: Any, **fields: Any) -> list[Any]:
    made: list[Any] = chat(input=list(items), **fields)["messages"]
    # OpenAI's own models take only text from tools; vLLM's take pictures too.
    MESSAGES.validate_python([message for message in made if not has_picture_of_tool(message)])
    return made


def has_picture_of_tool(message: dict[str, Any]) -> bool:
    return message["role"] == "tool" and isinstance(message["content"], list)


def test_a_text_is_the_users() -> None:
    assert chat() == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_instructions_come_first() -> None:
    made = messages(
        {"role": "developer", "content": "more"}, {"role": "user", "content": "hi"}, instructions="be brief"
    )
    assert made == [
        {"role": "system", "content": "be brief\n\nmore"},
        {"role": "user", "content": "hi"},
    ]


def test_parts_of_messages() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
    made = messages(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "this"}, picture]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "a cat", "annotations": []}]},
        {"type": "message", "role": "assistant", "id": "msg_2", "status": "completed",
         "content": [{"type": "refusal", "refusal": "no"}]},
    )  # fmt: skip
    assert made == [
        {"role": "user", "content": [
            {"type": "text", "text": "this"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
        ]},
        {"role": "assistant", "content": "a cat\n\nno"},
    ]  # fmt: skip


def test_sound_and_the_pictures_of_a_tool() -> None:
    sound = {"data": "AA==", "format": "wav"}
    made = messages(
        {"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "data:,"}]},
    )
    assert made[0]["content"] == [{"type": "input_audio", "input_audio": sound}]
    assert made[1]["content"] == [{"type": "image_url", "image_url": {"url": "data:,"}}]


def test_what_the_assistant_did_in_a_row_is_one_message() -> None:
    made = messages(
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a cat"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a dog"}]},
    )
    function = {"name": "look", "arguments": "{}"}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ("c1", "c2")]
    assert made[1:] == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
        {"role": "tool", "tool_call_id": "c2", "content": "a dog"},
    ]


def test_a_thought_belongs_to_the_call_that_it_led_to() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    made = messages({"role": "assistant", "content": "a"}, thought, call, thought, {"role": "user", "content": "b"})
    function = {"name": "look", "arguments": "{}"}
    called = [{"id": "c", "type": "function", "function": function}]
    assert made == [
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": called},
        {"role": "user", "content": "b"},
    ]


def test_encrypted_thoughts_are_left_out() -> None:
    made = messages(
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": "b"}
    )
    assert made == [{"role": "user", "content": "b"}]


def test_tools_nest_under_their_functions() -> None:
    translated = chat(tools=[LOOK, WAIT], tool_choice={"type": "function", "name": "look"}, parallel_tool_calls=False)
    assert translated["tools"] == [
        {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in (LOOK, WAIT)
    ]
    assert translated["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert translated["parallel_tool_calls"] is False


def test_only_the_allowed_tools_are_passed_on() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "wait"}]}
    translated = chat(tools=[LOOK, WAIT], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in translated["tools"]] == ["wait"]
    assert translated["tool_choice"] == "required"


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_without_tools_there_is_no_choice(choice: str | None) -> None:
    assert chat(tools=[], tool_choice=choice, parallel_tool_calls=True) == chat()
    assert chat(tools=[], tool_choice="required")["tool_choice"] == "required", "the engine refuses it"


def test_formats() -> None:
    schema = {"type": "object"}
    given = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert chat(text={"format": given})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert chat(text={"format": {"type": "text"}, "verbosity": "low"}) == chat()


def test_limits_logprobs_and_a_stream() -> None:
    translated = chat(
        max_output_tokens=5.0,
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        stream=True,
        stream_options={"include_obfuscation": False},
    )
    assert translated == chat() | {
        "max_tokens": 5,
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert repr(translated["max_tokens"]) == "5"


def test_what_it_does_not_know_stays() -> None:
    others = {
        "temperature": 0.5, "top_p": 0.9, "user": "u", "top_k": 3, "min_p": 0.1, "vllm_xargs": {"a": 1},
        "custom_params": {"b": 2}, "plait": {}, "cache_salt": "s", "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert chat(**others) == chat() | others


def test_what_only_the_answer_repeats_is_left_out() -> None:
    assert (
        chat(metadata={"a": "b"}, store=True, truncation="auto", previous_response_id="resp_1", background=True)
        == chat()
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0]"),
        ({"tools": [LOOK, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [LOOK], "tool_choice": {"type": "mcp", "server_label": "s"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5.5}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"instructions": 3}, "instructions"),
    ],
)
def test_what_it_refuses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(CallerError) as refusal:
        chat(**fields)
    assert (refusal.value.status, refusal.value.param) == (400, param)
    assert param in refusal.value.message
