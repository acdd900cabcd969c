"""The embedded engine over HTTP (in process): OpenAI's routes, usage, errors, aborts, cache state, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import msgspec
import pytest

from plait.backends.protocol.cache_state import CacheState
from plait.lab.embedded.responses import FINGERPRINT
from plait.policy.prefix.block_hash import chain, root_hash
from tests.lab.embedded.served_engine import KV_TOKENS, Served, serving

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}, "times": {"type": ["integer", "null"]}},
            "required": ["at", "times"],
        },
    },
}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served
        assert served.server.engines[0].running == served.server.engines[0].waiting == []


# Chat completions.


async def test_a_chat_completion(served: Served) -> None:
    body = await served.chat(max_tokens=9)
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("chat.completion", "m", FINGERPRINT)
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "This is e"}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    prompt_tokens = len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 9,
        "total_tokens": prompt_tokens + 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_brings_the_same_text_in_pieces(served: Served) -> None:
    whole = await served.chat(max_tokens=40, seed=3)
    first, *rest = await served.chat(max_tokens=40, seed=3, stream=True)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(rest) == 40
    text = "".join(event["choices"][0]["delta"]["content"] for event in rest)
    assert text == whole["choices"][0]["message"]["content"]
    assert [event["choices"][0]["finish_reason"] for event in rest] == [None] * 39 + ["length"]
    assert len({event["id"] for event in (first, *rest)}) == 1
    assert all("usage" not in event for event in (first, *rest))


async def test_a_stream_that_asks_for_it_ends_with_its_usage(served: Served) -> None:
    *_, last = await served.chat(max_tokens=2, stream=True, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2


async def test_the_next_turn_finds_the_last_one_cached(served: Served) -> None:
    first = await served.chat("x" * 200, max_tokens=20)
    again = await served.chat("x" * 200, max_tokens=20)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    prompt_tokens = again["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt_tokens - 1) // 16 * 16
    assert first["choices"] == again["choices"], "the same prompt and seed, the same text"


async def test_several_choices_differ_and_their_prompt_counts_once(served: Served) -> None:
    body = await served.chat(max_tokens=60, n=3)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 3
    assert body["usage"]["completion_tokens"] == 180
    assert body["usage"]["prompt_tokens"] < 100


async def test_a_streams_choices_are_told_apart(served: Served) -> None:
    whole = await served.chat(max_tokens=30, n=2)
    streamed = await served.chat(max_tokens=30, n=2, stream=True)
    for index in range(2):
        own = [event["choices"][0] for event in streamed if event["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"]["content"] for choice in own)
        assert text == whole["choices"][index]["message"]["content"]


async def test_a_stop_string_is_left_out_and_ends_the_call(served: Served) -> None:
    body = await served.chat(max_tokens=100, stop=["emu", "never"])
    assert body["choices"][0]["message"]["content"] == "This is "
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", "emu")
    assert body["usage"]["completion_tokens"] == len("This is emu")


async def test_without_a_limit_it_ends_by_itself_and_with_ignore_eos_at_the_context(served: Served) -> None:
    body = await served.chat("x" * 64)
    assert 64 <= body["usage"]["completion_tokens"] < 256
    assert body["choices"][0]["finish_reason"] == "stop"
    whole = await served.chat(ignore_eos=True)
    assert whole["usage"]["total_tokens"] == KV_TOKENS // 16 * 16
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_a_greeting_has_a_short_answer_unless_it_says_how_long(served: Served) -> None:
    body = await served.chat()
    assert 16 <= body["usage"]["completion_tokens"] < 40
    assert body["choices"][0]["finish_reason"] == "stop"
    longer = await served.chat(max_tokens=60)
    assert longer["usage"]["completion_tokens"] == 60


async def test_logprobs_come_with_every_token(served: Served) -> None:
    body = await served.chat(max_tokens=4, logprobs=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("This")
    assert content[0] == {"token": "T", "logprob": 0.0, "bytes": [84], "top_logprobs": []}


# Tool calls.


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_a_tool_is_called_with_arguments_that_fit_its_schema(served: Served, choice: Any) -> None:
    body = await served.chat(tools=[TOOL], tool_choice=choice)
    [answer] = body["choices"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    [call] = answer["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"]) == {"at": "emulated", "times": 1}


async def test_a_tool_call_streams_its_arguments(served: Served) -> None:
    first, *rest = await served.chat(tools=[TOOL], tool_choice="required", stream=True)
    [opening] = first["choices"][0]["delta"]["tool_calls"]
    assert (opening["index"], opening["function"]["name"], opening["function"]["arguments"]) == (0, "look", "")
    pieces = [event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] for event in rest]
    assert json.loads("".join(pieces)) == {"at": "emulated", "times": 1}
    assert rest[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["auto", "none", None])
async def test_it_does_not_call_tools_of_its_own_accord(served: Served, choice: str | None) -> None:
    body = await served.chat(tools=[TOOL], tool_choice=choice, max_tokens=4)
    assert body["choices"][0]["message"]["content"] == "This"


# Text completions.


async def test_a_text_completion(served: Served) -> None:
    body = await served.complete("abc ", max_tokens=4)
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["system_fingerprint"]) == ("text_completion", FINGERPRINT)
    assert body["choices"] == [{"index": 0, "text": "This", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["prompt_tokens"] == 4


async def test_token_ids_are_a_prompt_as_their_text_is(served: Served) -> None:
    await served.complete("a" * 100, max_tokens=1)
    body = await served.complete([97] * 100, max_tokens=1)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_several_prompts_each_have_their_choices(served: Served) -> None:
    body = await served.complete(["abc", "defgh"], max_tokens=2, n=2, echo=True)
    assert [choice["text"] for choice in body["choices"]] == ["abc T", "abc T", "defgh T", "defgh T"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 8,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_echoes_the_prompt_first(served: Served) -> None:
    streamed = await served.complete("abc", max_tokens=2, echo=True, stream=True)
    assert [event["choices"][0]["text"] for event in streamed] == ["abc", " ", "T"]


# Errors.

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "refusal"),
    [
        ("chat/completions", {"model": "other", "messages": HI}, (404, "model_not_found", "model")),
        ("completions", {"model": "other", "prompt": "x"}, (404, "model_not_found", "model")),
        ("chat/completions", {"messages": []}, (400, None, "messages")),
        ("chat/completions", {}, (400, None, "messages")),
        ("completions", {"prompt": []}, (400, None, "prompt")),
        ("completions", {"prompt": [1, -1]}, (400, None, "prompt")),
        ("completions", {"prompt": "x" * 5_000}, (400, "context_length_exceeded", "prompt")),
        ("completions", {"prompt": "x", "max_tokens": 4_000}, (400, "context_length_exceeded", "prompt")),
        ("completions", {"prompt": ["x", "x" * 5_000]}, (400, "context_length_exceeded", "prompt")),
        ("completions", {"prompt": ""}, (400, None, "prompt")),
        ("chat/completions", {"messages": HI, "max_tokens": 4_000}, (400, "context_length_exceeded", "messages")),
        ("chat/completions", {"messages": HI, "n": 0}, (400, None, "n")),
        ("chat/completions", {"messages": HI, "max_tokens": 0}, (400, None, "max_tokens")),
        ("chat/completions", {"messages": HI, "max_completion_tokens": 0}, (400, None, "max_completion_tokens")),
        ("completions", {"prompt": "x", "max_tokens": 0}, (400, None, "max_tokens")),
        ("chat/completions", {"messages": HI, "tool_choice": "required"}, (400, None, "tool_choice")),
        ("chat/completions", {"messages": HI, "tools": [TOOL], "tool_choice": "look"}, (400, None, "tool_choice")),
        (
            "chat/completions",
            {"messages": HI, "tools": [TOOL], "tool_choice": {"function": {"name": "x"}}},
            (400, None, "tool_choice"),
        ),
    ],
)
async def test_what_it_refuses_as_openai_would(
    served: Served, path: str, body: dict[str, Any], refusal: tuple[int, str | None, str]
) -> None:
    response = await served.post(f"/v1/{path}", **body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == refusal
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert served.server.engines[0].counters.calls == 0


async def test_an_empty_prompt_is_called_empty(served: Served) -> None:
    response = await served.post("/v1/completions", prompt="")
    assert response.json()["error"]["message"] == "The prompt is empty; it must have at least one token."


async def test_a_key_guards_all_but_health_and_metrics() -> None:
    async with serving(api_key="secret") as served:
        for method, path in (("GET", "/v1/models"), ("GET", "/cache_state"), ("POST", "/v1/completions")):
            for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}):
                response = await served.http.request(method, path, headers=headers)
                assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        served.http.headers["authorization"] = "Bearer secret"
        assert (await served.http.get("/v1/models")).status_code == 200
        del served.http.headers["authorization"]
        assert (await served.http.get("/health")).status_code == 200
        assert (await served.http.get("/metrics")).status_code == 200
        served.http.headers["x-api-key"] = "secret"
        assert (await served.http.get("/v1/models")).status_code == 200, "as Anthropic's clients send it"


# A client that goes away.


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_aborts_its_calls(served: Served, stream: bool) -> None:
    body = json.dumps({"model": "m", "prompt": "x", "n": 2, "max_tokens": 3_000, "stream": stream}).encode()
    gone, sent = asyncio.Event(), list[MutableMapping[str, Any]]()
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    request = asyncio.create_task(served.server.app(scope, receive, send))
    engine = served.server.engines[0]
    while engine.counters.output_tokens < 4:  # noqa: ASYNC110 - of the engine's own task
        await asyncio.sleep(0)
    gone.set()
    await request
    assert engine.running == []
    assert engine.counters.aborted_calls == 2
    assert engine.counters.output_tokens < 6_000
    assert [message["type"] for message in sent[:1]] == (["http.response.start"] if stream else [])
    assert all(message.get("more_body", True) for message in sent), "a broken stream has no end"


# What else it serves.


async def test_models(served: Served) -> None:
    response = await served.http.get("/v1/models")
    [model] = response.json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("m", "model", 4_000)


async def test_the_cache_state_in_json_and_msgpack(served: Served) -> None:
    await served.complete([7] * 130, max_tokens=1)
    as_json = await served.http.get("/cache_state")
    as_msgpack = await served.http.get("/cache_state", headers={"accept": "application/msgpack"})
    assert as_json.headers["content-type"] == "application/json"
    assert as_msgpack.headers["content-type"] == "application/msgpack"
    state = msgspec.msgpack.decode(as_msgpack.content, type=CacheState)
    assert msgspec.json.decode(as_json.content, type=CacheState) == state
    assert [(run.parent, run.hashes) for run in state.stored] == [(None, list(chain([7] * 130, 64, root_hash("m"))))]
    assert (state.engine, state.model, state.kv.total_blocks) == ("e", "m", 250)


async def test_a_report_since_a_cursor_is_a_delta_in_the_same_epoch_only(served: Served) -> None:
    await served.complete([7] * 130, max_tokens=1)
    seen = msgspec.json.decode((await served.http.get("/cache_state")).content, type=CacheState)
    query: dict[str, str | int] = {"since": seen.cursor, "epoch": seen.epoch}
    await served.complete([8] * 64, max_tokens=1)
    delta = msgspec.json.decode((await served.http.get("/cache_state", params=query)).content, type=CacheState)
    assert (delta.snapshot, [len(run.hashes) for run in delta.stored]) == (False, [1])
    query["epoch"] = "another"
    snapshot = msgspec.json.decode((await served.http.get("/cache_state", params=query)).content, type=CacheState)
    assert (snapshot.snapshot, sum(len(run.hashes) for run in snapshot.stored)) == (True, 3)


@pytest.mark.parametrize(
    "query", ["since=x", "since=-1", "since=", "wait_ms=1.5", "since=%C2%B2", "since=" + "9" * 5_000]
)
async def test_a_cursor_that_is_no_number_is_refused(served: Served, query: str) -> None:
    response = await served.http.get(f"/cache_state?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_metrics(served: Served) -> None:
    await served.complete("x" * 32, max_tokens=3)
    lines = (await served.http.get("/metrics")).text.splitlines()
    assert 'plait_engine_output_tokens_total{engine="e",model="m"} 3.0' in lines
    assert 'plait_engine_prompt_tokens_total{engine="e",model="m"} 32.0' in lines
    assert 'plait_engine_kv_blocks{engine="e",model="m"} 250.0' in lines
    assert any(line.startswith('plait_engine_busy_seconds_total{engine="e",model="m"}') for line in lines)
