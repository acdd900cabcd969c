"""Streams: the SDKs' own accumulators make the whole answer of them, however the engine's stream is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from plait.backends.translation.answer_translator import Identity, TurnTranslator
from plait.backends.translation.messages import MessageTurn
from plait.backends.translation.responses import ResponseTurn
from tests.backends.translation.chat_answers import error, message, stream, whole
from tests.backends.translation.event_grammars import events, read_message, read_response

IDENTITY = Identity("key", 1_700_000_000)
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def responses(**fields: Any) -> TurnTranslator:
    return TurnTranslator(ResponseTurn({"model": "m", "input": "hi", **fields}, IDENTITY))


def messages(**fields: Any) -> TurnTranslator:
    return TurnTranslator(MessageTurn({"model": "m", "messages": [], **fields}, IDENTITY))


def sealed(text: str) -> str:
    return f"sealed {text}"


def sealed_responses() -> TurnTranslator:
    asked = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    return TurnTranslator(ResponseTurn({"model": "m", "input": "hi", **asked}, IDENTITY, sealed))


def sealed_messages() -> TurnTranslator:
    return TurnTranslator(MessageTurn({"model": "m", "messages": []}, IDENTITY, sealed))


APIS = pytest.mark.parametrize("api", [responses, messages])


def folded_response(written: bytes) -> Any:
    """The response of `response.completed`, checked against what the SDK makes of the deltas before it."""
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    read = events(written)
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    for event in read:
        if event["type"] == "keepalive":  # no type of the SDK's, which passes over it
            continue
        state.handle_event(RESPONSE_EVENT.validate_python(event))
    last = read[-1]["response"]
    for grown, final in zip(state._ResponseStreamState__current_snapshot.output, last["output"], strict=True):
        if final["type"] == "function_call":
            assert (grown.arguments, grown.name, grown.call_id) == tuple(
                final[k] for k in ("arguments", "name", "call_id")
            )
        elif final["type"] == "message":
            pairs = zip(grown.content, final["content"], strict=True)
            assert all(part.type != "output_text" or part.text == whole_part["text"] for part, whole_part in pairs)
    done = [event["item"] for event in read if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    return last


def folded_message(written: bytes) -> Any:
    """What the SDK makes of the events."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events(written):
        if event["type"] == "ping":  # the SDK passes over it
            continue
        snapshot = accumulate_event(
            event=MESSAGE_EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
        )
    body = snapshot.to_dict(mode="json")
    assert body.pop("stop_details") is None
    return {**body, "content": [{k: v for k, v in block.items() if k != "parsed_output"} for block in body["content"]]}


FOLDS = {
    responses: folded_response,
    messages: folded_message,
    sealed_responses: folded_response,
    sealed_messages: folded_message,
}
TEXTS = st.none() | st.text(max_size=8)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["look", "wait"]),
        st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5)).map(json.dumps),
    ),
    max_size=3,
)
TURNS = st.builds(message, TEXTS, reasoning=TEXTS, calls=CALLS)


@pytest.mark.parametrize("api", FOLDS)
@given(said=TURNS, size=st.integers(1, 9), finish=st.sampled_from(["stop", "length", "tool_calls"]), data=st.data())
def test_a_stream_folds_to_the_whole_answer_however_it_is_cut(
    api: Callable[..., TurnTranslator], said: dict[str, Any], size: int, finish: str, data: st.DataObject
) -> None:
    chunks = stream(said, finish, size=size)
    at_once = api().feed(b"".join(chunks))
    translator, pieces, rest = api(), b"", chunks
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        pieces += translator.feed(b"".join(rest[:count]))
        rest = rest[count:]
    assert pieces == at_once
    assert FOLDS[api](at_once) == json.loads(api().whole(whole(said, finish)))


def test_a_thought_that_is_sealed() -> None:
    said = message("ab", reasoning="hm")
    chunks = b"".join(stream(said))
    [thought, _] = read_message(sealed_messages().feed(chunks))["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": "sealed hm"}
    [item, _] = read_response(sealed_responses().feed(chunks))["output"]
    assert (item["encrypted_content"], item["content"]) == ("sealed hm", [])
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    summarized = {"model": "m", "input": "hi", "reasoning": {"summary": "auto"}}
    whole_answer = json.loads(TurnTranslator(ResponseTurn(summarized, IDENTITY)).whole(whole(said)))
    assert whole_answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    unasked = TurnTranslator(ResponseTurn({"model": "m", "input": "hi"}, IDENTITY, sealed))
    [item, _] = read_response(unasked.feed(chunks))["output"]
    assert "encrypted_content" not in item


def test_the_events_of_a_response() -> None:
    said = message("ab", reasoning="hm", calls=[("look", "{}")])
    read = events(responses().feed(b"".join(stream(said, "tool_calls"))))
    assert [event["type"].removeprefix("response.") for event in read] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert read[0]["response"]["status"] == read[1]["response"]["status"] == "in_progress"
    assert read[0]["response"]["output"] == []
    assert [event["output_index"] for event in read[2:-1]] == [0] * 6 + [1] * 6 + [2] * 4


def test_the_events_of_a_message() -> None:
    said = message("ab", reasoning="hm", calls=[("look", "{}")])
    read = events(messages().feed(b"".join(stream(said, "tool_calls"))))
    assert [event["type"] for event in read] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event["delta"]["type"] for event in read if event["type"] == "content_block_delta"] == [
        "thinking_delta", "text_delta", "input_json_delta",
    ]  # fmt: skip
    assert read[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert read[-2]["usage"]["output_tokens"] == 7


@APIS
def test_an_event_comes_as_soon_as_its_text(api: Callable[..., TurnTranslator]) -> None:
    first, second, *_ = stream(message("abcdef"))
    translator = api()
    assert translator.feed(first)
    assert b'"abc"' in translator.feed(second)


@APIS
def test_calls_that_all_have_the_index_0_are_told_apart(api: Callable[..., TurnTranslator]) -> None:
    said = message(calls=[("look", '{"a":1}'), ("wait", '{"b":2}')])
    chunks = [chunk.replace(b'"index": 1', b'"index": 0') for chunk in stream(said, "tool_calls")]
    assert FOLDS[api](api().feed(b"".join(chunks))) == json.loads(api().whole(whole(said, "tool_calls")))


@APIS
def test_an_id_that_is_repeated_is_no_new_call(api: Callable[..., TurnTranslator]) -> None:
    said = message(calls=[("look", '{"a":1}')])
    chunks = [
        chunk.replace(b'"function": {"arguments"', b'"id": "call_0", "function": {"name": "look", "arguments"')
        for chunk in stream(said, "tool_calls")
    ]
    assert FOLDS[api](api().feed(b"".join(chunks))) == json.loads(api().whole(whole(said, "tool_calls")))


@APIS
def test_comments_stay_and_become_signs_of_life(api: Callable[..., TurnTranslator]) -> None:
    waits, first = b": waiting\n\n", b"".join(stream(message("a"))[:2])
    translator, plain = api(), events(api().feed(first))
    told = translator.feed(waits)
    assert told.startswith(waits + b"event: ")
    assert events(translator.feed(first))[-1] == plain[-1]
    assert translator.feed(waits).startswith(waits + b"event: ")
    *_, done = stream(message("a"))
    assert translator.feed(done)
    assert translator.feed(waits) == waits, "nothing follows the end"


@APIS
def test_line_ends_may_be_those_of_http(api: Callable[..., TurnTranslator]) -> None:
    chunks = b"".join(stream(message("ab")))
    assert api().feed(chunks.replace(b"\n", b"\r\n")) == api().feed(chunks)


@APIS
def test_other_choices_are_left_out(api: Callable[..., TurnTranslator]) -> None:
    other = stream(message("other"))[1].replace(b'"index": 0', b'"index": 1')
    first, *rest = stream(message("ab"))
    assert api().feed(b"".join([first, other, *rest])) == api().feed(b"".join([first, *rest]))


# Errors.


def test_an_error_in_a_response_that_has_begun() -> None:
    translator = responses()
    begun = translator.feed(b"".join(stream(message("abcdef"))[:2]))
    failed, raised = events(translator.feed(error()))
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert (raised["type"], raised["message"], raised["code"]) == ("error", "it broke", "engine_broken")
    assert raised["error"]["message"] == "it broke", "at this, the SDKs raise"
    for event in (failed, raised):
        RESPONSE_EVENT.validate_python(event)
    assert failed["sequence_number"] == len(events(begun))
    assert raised["sequence_number"] == failed["sequence_number"] + 1
    assert translator.feed(b"data: [DONE]\n\n") == b""


def test_an_error_before_a_response_has_begun() -> None:
    [raised] = events(responses().feed(error()))
    assert (raised["type"], raised["sequence_number"]) == ("error", 0)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("engine_error", "api_error"),
        ("overloaded_error", "overloaded_error"),
        ("BadRequestError", "invalid_request_error"),
    ],
)
def test_an_error_in_a_message(kind: str, named: str) -> None:
    translator = messages()
    translator.feed(b"".join(stream(message("abcdef"))[:2]))
    [raised] = events(translator.feed(error().replace(b"engine_error", kind.encode())))
    assert raised == {"type": "error", "error": {"type": named, "message": "it broke"}}
    assert translator.feed(b"".join(stream(message("abcdef"))[2:])) == b""


@APIS
@pytest.mark.parametrize("data", [b'data: {"error":"it broke"}\n\n', b"data: it broke\n\n", b'data: {"choices":3}\n\n'])
def test_what_is_no_chunk_is_an_error(api: Callable[..., TurnTranslator], data: bytes) -> None:
    assert events(api().feed(data))[-1]["type"] == "error"
