"""The checks of strict engines say yes to a whole conversation of an agent, and no to each of its faults."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends.translation.strict_engines import (
    NO_OBJECT,
    NOT_ALTERNATING,
    NOT_JSON,
    RefusedError,
    check_alternating,
    check_sglang_0_5_13,
    check_vllm_0_25,
)

ENGINES = {"vllm": check_vllm_0_25, "sglang": check_sglang_0_5_13}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}
USER = {"role": "user", "content": [{"type": "text", "text": "Look."}, PICTURE]}
CALLING = {"role": "assistant", "content": None, "reasoning": "I think.", "reasoning_content": "I think."}
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        USER,
        {**CALLING, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "A cat."}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ],
    "tools": [LOOK],
    "tool_choice": "auto",
    "reasoning_effort": "high",
    "max_tokens": 100,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
}


def with_message(index: int, **fields: Any) -> dict[str, Any]:
    body = copy.deepcopy(BODY)
    body["messages"][index] |= fields
    return body


def with_arguments(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return with_message(2, tool_calls=[{"id": "call_1", "type": "function", "function": function}])


def with_tool(**fields: Any) -> dict[str, Any]:
    return {**BODY, "tools": [{"type": "function", "function": {**LOOK["function"], **fields}}]}  # type: ignore[dict-item]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_conversation_is_accepted(engine: str) -> None:
    before = copy.deepcopy(BODY)
    ENGINES[engine](BODY)
    assert before == BODY, "the body is as it was"


@pytest.mark.parametrize(
    ("body", "refusing", "words"),
    [
        (with_arguments('{"at":"x'), "vllm sglang", NOT_JSON),
        (with_arguments("[]"), "vllm sglang", NO_OBJECT),
        (with_arguments('""'), "vllm sglang", NO_OBJECT),
        (with_arguments("null"), "sglang", NO_OBJECT),
        (with_arguments(""), "sglang", NOT_JSON),
        (with_arguments('{"at":NaN}'), "sglang", NOT_JSON),
        (with_arguments('{"at":"\\ud83d"}'), "sglang", NOT_JSON),
        (with_arguments(None), "vllm sglang", ""),
        (with_arguments({"at": "x"}), "vllm", "arguments"),
        (with_message(2, tool_calls=[{"id": "1", "type": "custom", "custom": {}}]), "vllm sglang", ""),
        (with_message(2, tool_calls=[{**CALL, "id": None}]), "vllm", "id"),
        (with_message(2, tool_calls=None), "vllm", "tool_calls"),
        (with_message(2, reasoning_content=["I think."]), "sglang", "reasoning_content"),
        (with_message(1, content=None), "vllm sglang", "content"),
        (with_message(1, role="client"), "sglang", "role"),
        (with_message(1, name=None), "vllm", "name"),
        (with_message(3, content={"said": "A cat."}), "vllm sglang", "list"),
        (with_message(3, content=[PICTURE]), "", ""),
        (with_message(1, content=[{"type": "input_text", "text": "x"}]), "vllm sglang", ""),
        (with_message(1, content=[{"type": "file", "file": {"file_id": "1"}}]), "vllm sglang", ""),
        (with_message(1, content=[{**PICTURE, "image_url": {"url": "x", "detail": "original"}}]), "sglang", ""),
        (with_message(1, content=[{"type": "image_url", "image_url": {}}]), "vllm sglang", ""),
        (with_message(1, content=[{"type": "text", "text": None}]), "vllm sglang", ""),
        (with_message(4, content=[{"type": "refusal", "refusal": "No."}]), "sglang", ""),
        ({**BODY, "messages": []}, "sglang", "empty"),
        ({**BODY, "reasoning_effort": "minimal"}, "sglang", "reasoning_effort"),
        ({**BODY, "reasoning_effort": "xhigh"}, "sglang", "reasoning_effort"),
        ({**BODY, "reasoning_effort": "most"}, "vllm sglang", "reasoning_effort"),
        ({**BODY, "tools": []}, "vllm", "empty array"),
        ({**BODY, "tools": None}, "vllm", "`tools` must be set"),
        ({**BODY, "tools": None, "tool_choice": "required"}, "vllm sglang", ""),
        ({**BODY, "tool_choice": {"type": "function", "function": {"name": "hear"}}}, "vllm sglang", ""),
        ({**BODY, "tool_choice": {"type": "allowed_tools"}}, "vllm sglang", ""),
        ({**BODY, "tools": [{"type": "web_search"}]}, "vllm sglang", ""),
        (with_tool(strict=None), "sglang", "strict"),
        (with_tool(parameters=None), "", ""),
        (with_tool(parameters={"type": "thing"}), "sglang", "schema"),
        ({**BODY, "max_tokens": 0}, "vllm", "max_tokens"),
        ({**BODY, "temperature": 3}, "vllm", "temperature"),
        ({**BODY, "top_p": 0}, "vllm sglang", "top_p"),
        ({**BODY, "top_k": 0}, "sglang", "top_k"),
        ({**BODY, "parallel_tool_calls": None}, "sglang", "parallel_tool_calls"),
        ({**BODY, "stream": False}, "vllm", "stream=True"),
        ({**BODY, "top_logprobs": 2}, "vllm", "logprobs"),
        ({**BODY, "response_format": {"type": "json_schema"}}, "vllm sglang", ""),
        ({**BODY, "response_format": {"type": "grammar"}}, "vllm sglang", "response_format"),
        ({**BODY, "seed": "x"}, "vllm sglang", "seed"),
        ({**BODY, "metadata": {"a": 1}, "store": False, "unheard_of": 1}, "", ""),
    ],
)
def test_a_fault_is_refused(body: Mapping[str, Any], refusing: str, words: str) -> None:
    for engine, check in ENGINES.items():
        if engine in refusing.split():
            with pytest.raises(RefusedError) as refused:
                check(body)
            assert words in str(refused.value), engine
        else:
            check(body)


def messages(spoken: str) -> list[dict[str, Any]]:
    """`c` is an assistant's call, `t` its result."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}
    return [CALLING | {"tool_calls": [CALL]} if one == "c" else {"role": roles[one], "content": "x"} for one in spoken]


@pytest.mark.parametrize("spoken", ["u", "su", "suau", "suctau", "uctctau", "uccttau", "uct"])
def test_turns_are_accepted(spoken: str) -> None:
    check_alternating(messages(spoken))


@pytest.mark.parametrize("spoken", ["uu", "sa", "suua", "uaa", "suctu", "uctaa", "uaca", "suauu"])
def test_the_same_role_twice_is_refused(spoken: str) -> None:
    with pytest.raises(RefusedError, match=NOT_ALTERNATING[:40]):
        check_alternating(messages(spoken))


@pytest.mark.parametrize("spoken", ["ssu", "usa", "du"])
def test_a_role_out_of_place_is_refused(spoken: str) -> None:
    with pytest.raises(RefusedError, match="Only"):
        check_alternating(messages(spoken))
