"""Completions assembled from the events of streams: equal to the whole answers, however the stream is cut."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.profiles import load_profile
from plait.backends.tokenization.loading import load_tokenizer
from plait.gateway.answers.assembled_completion import AssembledCompletion
from plait.lab.embedded.completion import ServedModel
from plait.lab.embedded.engine import EngineSettings
from plait.lab.embedded.server import EmbeddedServer, ServerSettings

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def assembled(*events: Any) -> Any:
    completion = AssembledCompletion()
    for one in events:
        completion.feed(one if isinstance(one, bytes) else event(one))
    return json.loads(completion.json())


def chunk(choices: list[Json], **more: Any) -> Json:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "m",
        "choices": choices,
        **more,
    }


def delta(finish_reason: str | None = None, index: int = 0, more: Json | None = None, **fields: Any) -> Json:
    choice = {"index": index, "delta": fields, "logprobs": None, "finish_reason": finish_reason, **(more or {})}
    return chunk([choice])


# Engines' streams.


def test_vllms_chat() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": None}
    found = assembled(
        chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}])
        | {"prompt_token_ids": [1, 2, 3]},
        delta(reasoning="hm", more={"token_ids": [7]}),
        delta(content="Fine", more={"token_ids": [8]}) | {"usage": None},
        delta("stop", content="", more={"stop_reason": 151_645, "token_ids": [9]}) | {"system_fingerprint": "vllm-1"},
        chunk([], usage=usage),
        DONE,
    )
    assert found == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Fine", "reasoning": "hm"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 151_645,
                "token_ids": [7, 8, 9],
            }
        ],
        "prompt_token_ids": [1, 2, 3],
        "system_fingerprint": "vllm-1",
        "usage": usage,
    }


def test_tool_calls_are_merged_by_their_index() -> None:
    def call(index: int, arguments: str, **more: Any) -> Json:
        name = {"name": more.pop("name")} if "name" in more else {}
        return {"index": index, **more, "function": {**name, "arguments": arguments}}

    found = assembled(
        delta(role="assistant", content=""),
        delta(tool_calls=[call(0, "", id="a", type="function", name="look")]),
        delta(tool_calls=[call(0, '{"at":')]),
        delta(tool_calls=[call(1, "{", id="b", type="function", name="go"), call(0, "1}", id=None, name=None)]),
        delta("tool_calls", tool_calls=[call(1, "}", id="b", type="function", name="go")]),
    )
    assert found["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}},
            {"id": "b", "type": "function", "function": {"name": "go", "arguments": "{}"}},
        ],
    }


def test_a_completion_that_comes_in_one_event_stays_as_it_is() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [], "function_call": {"name": "f", "arguments": "{}"}}
    whole = {
        "id": "1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1},
    }
    assert assembled(whole, DONE) == whole


def test_choices_are_in_the_order_of_their_indices() -> None:
    found = assembled(delta(index=1, content="b"), delta(index=0, content="a"), delta("stop", index=1, content="c"))
    assert [(one["index"], one["message"]["content"]) for one in found["choices"]] == [(0, "a"), (1, "bc")]


def test_refusals_and_their_log_probabilities_are_texts_and_lists() -> None:
    def refusing(token: str) -> Json:
        return delta(
            refusal=token, more={"logprobs": {"content": None, "refusal": [{"token": token, "logprob": -1e-07}]}}
        )

    (choice,) = assembled(delta(role="assistant", content=None, refusal=None), refusing("I "), refusing("can't"))[
        "choices"
    ]
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": "I can't"}
    assert choice["logprobs"]["content"] is None
    assert [one["token"] for one in choice["logprobs"]["refusal"]] == ["I ", "can't"]


def test_numbers_stay_as_they_were_written() -> None:
    completion = AssembledCompletion()
    for number in (b"-1e-07", b"12345678901234567890123"):
        completion.feed(
            b'data: {"choices":[{"index":0,"logprobs":{"token_logprobs":[%b]}}],"at":%b}\n\n' % (number, number)
        )
    assert completion.json() == (
        b'{"at":12345678901234567890123,'
        b'"choices":[{"index":0,"logprobs":{"token_logprobs":[-1e-07,12345678901234567890123]}}]}'
    )


def test_comments_and_names_of_events_say_nothing() -> None:
    assert assembled(b": waiting\n\n", b'event: x\r\ndata: {"id": "1"}\r\n\r\n') == {"id": "1"}


@pytest.mark.parametrize(
    "data",
    [
        b"<html>",
        b"[]",
        b'{"a": "\xff"}',
        b'{"choices": {}}',
        b'{"choices": [1]}',
        b'{"choices": [{"index": "0"}]}',
        b'{"choices": [{"delta": "x"}]}',
        b'{"choices": [{"delta": {"tool_calls": {}}}]}',
        b'{"choices": [{"logprobs": 1}]}',
        b'{"choices": [{"text": 1}]}',
        b'{"choices": [{"text": "\\ud800"}]}',
        b'{"choices": [{"token_ids": [1]}, {"index": 0, "token_ids": 2}]}',
        b'{"choices": [{"delta": %b}]}' % (b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    ],
)
def test_what_is_no_event_of_a_completion_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no event of a completion"):
        AssembledCompletion().feed(b"data: " + data + b"\n\n")


# Any answer, in any pieces.

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.none() | st.integers(-9, 9) | st.booleans() | st.lists(st.integers(0, 9), max_size=2)
NAMES = st.sampled_from(["reasoning", "reasoning_content", "refusal", "annotation"])
TOOL_CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": TEXTS,
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS}),
        }
    ),
    min_size=1,
    max_size=3,
)
TOKENS = st.lists(st.fixed_dictionaries({"token": TEXTS, "logprob": st.floats(-9, 0)}), max_size=4)


@st.composite
def messages(draw: st.DrawFn) -> Json:
    message: Json = {
        "role": "assistant",
        "content": draw(TEXTS),
        **draw(st.dictionaries(NAMES, TEXTS | st.none(), max_size=3)),
    }
    if draw(st.booleans()):
        message |= {"tool_calls": draw(TOOL_CALLS), "content": draw(TEXTS) or None}
    return message


@st.composite
def answers(draw: st.DrawFn) -> Json:
    is_chat = draw(st.booleans())
    choices = []
    for index in range(draw(st.integers(1, 3))):
        body = {"message": draw(messages())} if is_chat else {"text": draw(TEXTS)}
        logprobs: Json = (
            {"content": draw(TOKENS)} if is_chat else {"tokens": draw(st.lists(TEXTS)), "text_offset": [0, 3]}
        )
        choices.append(
            {
                "index": index,
                **body,
                "logprobs": draw(st.none() | st.just(logprobs)),
                "finish_reason": draw(st.sampled_from(["stop", "length"])),
                "stop_reason": draw(st.none() | st.just(7) | TEXTS),
            }
        )
    return {
        "id": draw(TEXTS),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": draw(st.integers(0, 2**40)),
        "model": draw(TEXTS),
        "choices": choices,
        "service_tier": draw(VALUES),
        "usage": {"prompt_tokens": draw(st.integers(0, 9)), "prompt_tokens_details": draw(st.none())},
    }


@given(st.data())
def test_any_answer_in_any_pieces_is_assembled(data: st.DataObject) -> None:
    """Each value is cut where the data says, and the parts of the choices come in turns."""
    answer = data.draw(answers())
    envelope = {name: value for name, value in answer.items() if name not in {"choices", "usage"}}
    if envelope["object"] == "chat.completion":
        envelope["object"] = "chat.completion.chunk"
    waiting = [_parts(data.draw, choice) for choice in answer["choices"]]
    events = []
    while any(waiting):
        parts = data.draw(st.sampled_from([parts for parts in waiting if parts]))
        events.append(event({**envelope, "choices": [parts.pop(0)], "usage": None}))
    events.append(event({**envelope, "choices": [], "usage": answer["usage"]}))
    events.append(DONE)
    ends = sorted(data.draw(st.sets(st.integers(0, len(events)))) | {0, len(events)})
    pieces = [b"".join(events[start:end]) for start, end in pairwise(ends)]
    assert assembled(*pieces) == answer


def _parts(draw: Any, choice: Json) -> list[Json]:
    """The deltas of a choice: one per character or item, or several at once."""
    parts: list[Json] = []

    def part(**fields: Any) -> None:
        parts.append({"index": choice["index"], "logprobs": None, "finish_reason": None, **fields})

    body, key = (choice["message"], "delta") if "message" in choice else ({"text": choice["text"]}, "")
    opening = {name: "" if isinstance(value, str) and name != "role" else None for name, value in body.items()}
    opening = {name: value for name, value in opening.items() if name != "tool_calls"}
    opening |= {"role": "assistant"} if key else {}
    part(**({key: opening} if key else opening))
    for name, value in body.items():
        if isinstance(value, str) and name != "role":
            for piece in _cut(draw, value):
                part(**({key: {name: piece}} if key else {name: piece}))
    for place, call in enumerate(body.get("tool_calls", ())):
        begun = deepcopy(call)
        begun["function"]["arguments"] = ""
        part(delta={"tool_calls": [{"index": place, **begun}]})
        for piece in _cut(draw, call["function"]["arguments"]):
            part(delta={"tool_calls": [{"index": place, "function": {"arguments": piece}}]})
    for name, column in (choice["logprobs"] or {}).items():
        for piece in _cut(draw, column) or [[]]:
            part(logprobs={name: piece})
    part(finish_reason=choice["finish_reason"], stop_reason=choice["stop_reason"])
    return parts


def _cut(draw: Any, value: Any) -> list[Any]:
    """A text or a list in pieces."""
    ends = sorted(draw(st.sets(st.integers(0, len(value)), max_size=3)) | {0, len(value)})
    return [value[start:end] for start, end in pairwise(ends)]


# The embedded engine.

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ANY = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
HI = [{"role": "user", "content": "hi"}]
REQUESTS: list[Json] = [
    {"messages": HI, "max_tokens": 1},
    {"messages": HI, "max_tokens": 40},
    {"messages": HI, "max_completion_tokens": 9, "seed": 4, "temperature": 0.3},
    {"messages": HI},
    {"messages": HI, "max_tokens": 30, "stop": ["a", "the text"]},
    {"messages": HI, "max_tokens": 30, "stop": "is", "logprobs": True},
    {"messages": HI, "max_tokens": 12, "logprobs": True, "top_logprobs": 3},
    {"messages": HI, "max_tokens": 9, "n": 1},
    {"messages": HI, "max_tokens": 9, "n": 3, "logprobs": True},
    {"messages": HI, "max_tokens": 9, "response_format": {"type": "json_object"}},
    {"messages": HI, "tools": [LOOK], "max_tokens": 9},
    {"messages": HI, "tools": [LOOK], "tool_choice": "required"},
    {"messages": HI, "tools": [LOOK, ANY], "tool_choice": {"type": "function", "function": {"name": "go"}}},
    {"messages": HI, "tools": [ANY], "tool_choice": "required", "logprobs": True, "max_tokens": 2},
    {"prompt": "hi", "max_tokens": 20},
    {"prompt": "hi"},
    {"prompt": [1, 2, 3], "max_tokens": 5, "stop": "e"},
    {"prompt": "hi", "max_tokens": 9, "echo": True},
    {"prompt": "hi", "max_tokens": 9, "logprobs": 2},
    {"prompt": "hi there", "max_tokens": 9, "echo": True, "logprobs": 0},
    {"prompt": ["hi", "there"], "max_tokens": 9, "n": 2, "echo": True, "logprobs": 1, "stop": "a"},
]


@pytest.mark.parametrize("request_fields", REQUESTS, ids=lambda fields: json.dumps(fields)[:60])
async def test_the_embedded_engines_stream_is_its_whole_answer(request_fields: Json) -> None:
    async def answer(**more: Any) -> bytes:
        """Of an engine whose cache is empty."""
        server = EmbeddedServer(
            ServerSettings(
                engine=EngineSettings(name="e", model="m", kv_tokens=4_000),
                cost_model=load_profile("a6000-mistral-7b").cost_model(),
                model=ServedModel("m", load_tokenizer("embedded"), 4_000),
                time_scale=10_000.0,
            )
        )
        transport = httpx.ASGITransport(server.app)
        async with server.app.router.lifespan_context(server.app), httpx.AsyncClient(transport=transport) as http:
            path = "chat/completions" if "messages" in request_fields else "completions"
            body = {"model": "m", **request_fields, **more}
            sent = await http.post(f"http://e/v1/{path}", json=body, headers={"x-request-id": "r"})
            assert sent.status_code == 200, sent.text
            return sent.content

    whole = json.loads(await answer())
    found = assembled(await answer(stream=True, stream_options={"include_usage": True}))
    assert found | {"created": 0} == whole | {"created": 0}
