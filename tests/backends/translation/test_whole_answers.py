"""Whole answers, against the types of the SDKs that read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message
from openai.types.responses import Response

from plait.backends.errors import EngineGarbledError
from plait.backends.translation.translation import TRANSLATIONS
from tests.backends.translation.chat_answers import USAGE, message, whole

ASKED = {"model": "m", "input": "hi", "messages": [], "max_tokens": 9}


def response(answer: bytes, **fields: Any) -> Response:
    body = TRANSLATIONS["/v1/responses"].answer({**ASKED, **fields}).whole(answer)
    return Response.model_validate_json(body)


def anthropic_message(answer: bytes, **fields: Any) -> Message:
    body = TRANSLATIONS["/v1/messages"].answer({**ASKED, **fields}).whole(answer)
    return Message.model_validate_json(body)


# Responses.


def test_a_response_with_a_text() -> None:
    made = response(whole(message("a cat")))
    assert (made.object, made.status, made.model, made.output_text) == ("response", "completed", "m", "a cat")
    assert made.id.startswith("resp_")
    [item] = made.output
    assert item.type == "message"
    assert item.id.startswith("msg_")
    assert item.status == "completed"
    assert item.content[0].to_dict() == {"type": "output_text", "text": "a cat", "annotations": [], "logprobs": []}
    assert made.usage is not None
    assert made.usage.to_dict() == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 27,
    }


def test_a_response_with_thoughts_text_and_calls() -> None:
    said = message("I look.", reasoning="hm", calls=[("look", '{"at":1}'), ("wait", "{}")])
    made = response(whole(said, "tool_calls"))
    thought, text, look, wait = made.output
    assert thought.type == "reasoning"
    assert thought.id.startswith("rs_")
    assert thought.content is not None
    assert [content.text for content in thought.content] == ["hm"]
    assert text.type == "message"
    assert look.type == wait.type == "function_call"
    assert (look.call_id, look.name, look.arguments, look.status) == ("call_0", "look", '{"at":1}', "completed")
    assert (wait.call_id, wait.name, wait.arguments) == ("call_1", "wait", "{}")
    assert look.id is not None
    assert look.id.startswith("fc_")
    assert len({item.id for item in made.output}) == 4


def test_a_refusal() -> None:
    [item] = response(whole(message(refusal="no"))).output
    assert item.type == "message"
    assert item.content[0].to_dict() == {"type": "refusal", "refusal": "no"}


@pytest.mark.parametrize(
    ("finish_reason", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_an_incomplete_response(finish_reason: str, reason: str) -> None:
    made = response(whole(message("a c"), finish_reason))
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == reason
    [item] = made.output
    assert item.type == "message"
    assert item.status == "incomplete"


def test_a_response_repeats_what_was_asked() -> None:
    tool = {"type": "function", "name": "look", "parameters": {}, "strict": True}
    asked: dict[str, Any] = {
        "instructions": "be brief", "previous_response_id": "resp_0", "metadata": {"a": "b"}, "temperature": 0.5,
        "tools": [tool], "tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": False,
        "text": {"format": {"type": "json_object"}}, "max_output_tokens": 5, "truncation": "auto", "user": "u",
        "reasoning": {"effort": "low"}, "store": False, "top_p": 0.9,
    }  # fmt: skip
    made = response(whole(message("a")), **asked).to_dict()
    assert {key: made[key] for key in asked} == asked
    defaults = response(whole(message("a")))
    assert (defaults.tools, defaults.tool_choice, defaults.parallel_tool_calls) == ([], "auto", True)
    assert (defaults.truncation, defaults.previous_response_id, defaults.error) == ("disabled", None, None)


def test_logprobs_come_if_requested() -> None:
    token = {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "b", "logprob": -2, "bytes": [98]}],
    }
    answer = whole(message("a"), logprobs={"content": [token]})
    [item] = response(answer, include=["message.output_text.logprobs"]).output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    assert item.content[0].logprobs is not None
    [logprob] = item.content[0].logprobs
    assert (logprob.token, logprob.bytes, logprob.logprob) == ("a", [97], -0.5)
    assert logprob.top_logprobs[0].token == "b"
    [item] = response(answer).output
    assert item.type == "message"
    assert item.content[0].to_dict()["logprobs"] == []


# Messages.


def test_a_message_with_a_text() -> None:
    made = anthropic_message(whole(message("a cat")))
    assert (made.type, made.role, made.model, made.stop_reason) == ("message", "assistant", "m", "end_turn")
    assert made.id.startswith("msg_")
    assert [block.to_dict() for block in made.content] == [{"type": "text", "text": "a cat"}]
    assert (made.usage.input_tokens, made.usage.cache_read_input_tokens, made.usage.output_tokens) == (4, 16, 7)
    assert made.usage.cache_creation_input_tokens == 0
    assert made.usage.output_tokens_details is not None
    assert made.usage.output_tokens_details.thinking_tokens == 2


def test_a_message_with_thoughts_text_and_calls() -> None:
    said = message("I look.", reasoning="hm", calls=[("look", '{"at":1}'), ("wait", "")])
    made = anthropic_message(whole(said, "tool_calls"))
    assert made.stop_reason == "tool_use"
    assert [block.to_dict() for block in made.content] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_0", "name": "look", "input": {"at": 1}},
        {"type": "tool_use", "id": "call_1", "name": "wait", "input": {}},
    ]


@pytest.mark.parametrize(
    ("finish_reason", "more", "reason", "sequence"),
    [
        ("stop", {}, "end_turn", None),
        ("length", {}, "max_tokens", None),
        ("content_filter", {}, "refusal", None),
        ("stop", {"stop_reason": "END"}, "stop_sequence", "END"),
        ("stop", {"matched_stop": "END"}, "stop_sequence", "END"),
        ("stop", {"stop_reason": "other"}, "end_turn", None),
        ("stop", {"stop_reason": 151_645}, "end_turn", None),
    ],
)
def test_why_a_message_stopped(finish_reason: str, more: dict[str, Any], reason: str, sequence: str | None) -> None:
    made = anthropic_message(whole(message("a"), finish_reason, **more), stop_sequences=["END"])
    assert (made.stop_reason, made.stop_sequence) == (reason, sequence)


def test_a_forced_call_is_a_tools_use_also_if_the_engine_says_stop() -> None:
    assert anthropic_message(whole(message(calls=[("look", "{}")]), "stop")).stop_reason == "tool_use"


def test_arguments_that_are_no_object_become_an_empty_one() -> None:
    [block] = anthropic_message(whole(message(calls=[("look", '{"at":')]), "length")).content
    assert block.to_dict()["input"] == {}


# Both.


@pytest.mark.parametrize("path", TRANSLATIONS)
def test_an_answer_without_usage_or_model(path: str) -> None:
    body = json.loads(whole(message("a"), usage=None))
    del body["model"]
    made = json.loads(TRANSLATIONS[path].answer(ASKED).whole(json.dumps(body).encode()))
    assert (made["model"], made["usage"]["output_tokens"]) == ("m", 0)


@pytest.mark.parametrize("path", TRANSLATIONS)
@pytest.mark.parametrize("answer", [b"no", b"[]", b"{}", b'{"choices":3}'])
def test_what_is_no_answer(path: str, answer: bytes) -> None:
    with pytest.raises(EngineGarbledError, match="not a chat completion"):
        TRANSLATIONS[path].answer(ASKED).whole(answer)


@pytest.mark.parametrize("path", TRANSLATIONS)
def test_each_answer_has_its_own_id(path: str) -> None:
    answers = [json.loads(TRANSLATIONS[path].answer(ASKED).whole(whole(message("a"), usage=USAGE))) for _ in range(2)]
    assert answers[0]["id"] != answers[1]["id"]
