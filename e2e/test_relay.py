"""What passes through the gateway unchanged and what does not, seen from an engine that writes down every byte."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from e2e.sdk import asking, sync_client
from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from e2e.stub_engine import EVENT_STREAM, JSON, Script, StubEngine
from tests.waiting import SLOWNESS

CHUNK = '{"id":"c","object":"chat.completion.chunk","created":1,"model":"demo","choices":[{"index":0,"delta":%s}]%s}'
USAGE = '"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}'
FINISH = f"data: {CHUNK % ('{}', '')}\n\n".replace('"delta":{}', '"delta":{},"finish_reason":"stop"').encode()
DONE = FINISH + b"data: [DONE]\n\n"
WHOLE = b'{"choices": [ {"finish_reason":"stop"} ]}'


def event(text: str, more: str = "") -> bytes:
    """An event with a piece of text."""
    return f"data: {CHUNK % (json.dumps({'content': text}, ensure_ascii=False), more)}\n\n".encode()


USAGE_EVENT = f'data: {{"id":"c","object":"chat.completion.chunk","choices":[],{USAGE}}}\n\n'.encode()
HELLO = [event("Hello"), event(" wörld 🌍"), event(".")]
STREAMS = {
    "plain": b"".join(HELLO) + DONE,
    "usage beside text": event("Hi", f",{USAGE}") + event("!", ',"usage":null') + DONE,
    "carriage returns": (b"".join(HELLO) + DONE).replace(b"\n", b"\r\n"),
    "comments, names and ids": b": ping\n\nevent: token\nid: 1\nretry: 10\n" + HELLO[0] + b":\n\n" + DONE,
    "no space": HELLO[0].replace(b"data: ", b"data:") + DONE,
    "data in two lines": b'data: {"choices":\ndata: []}\n\n' + DONE,
    "no JSON": b"data: hello\n\ndata: {\n\n" + DONE,
    "an error of the caller's": HELLO[0] + b'data: {"error": {"message": "too long", "code": 400}}\n\n' + DONE,
    "no end of the last event": HELLO[0] + DONE.rstrip(b"\n"),
}
PIECES: list[int | str] = ["whole", 5, "random"]
"""How streams are cut: not at all, every so many bytes, anywhere."""


@pytest.fixture(scope="module")
def stub() -> Iterator[StubEngine]:
    """The engine of this module."""
    with StubEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(stub: StubEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An open gateway over it."""
    with Launcher(tmp_path_factory.mktemp("relay")) as launch:
        yield started(launch, stub)


@pytest.fixture(scope="module")
def hasty(stub: StubEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A gateway that waits a second for an answer and for each piece of one."""
    with Launcher(tmp_path_factory.mktemp("hasty")) as launch:
        yield started(launch, stub, first_byte_timeout_s=SLOWNESS, idle_timeout_s=SLOWNESS)


def started(launch: Launcher, stub: StubEngine, **upstream: float) -> Server:
    server = launch.gateway([{"name": "stub", "url": stub.url}], upstream=upstream)
    server.start()
    server.wait_until_ready()
    return server


def cut(stream: bytes, pieces: int | str) -> list[bytes]:
    """The stream in pieces of that many bytes, whole, or of random lengths."""
    if pieces == "whole":
        return [stream] if stream else []
    lengths = random.Random(str(pieces))
    parts, start = [], 0
    while start < len(stream):
        length = pieces if isinstance(pieces, int) else lengths.randint(1, 60)
        parts.append(stream[start : start + length])
        start += length
    return parts


def post(gateway: Server, **fields: Any) -> httpx.Response:
    """A chat completion, answered as the stub's script says."""
    return gateway.post("/v1/chat/completions", json=asking("Hello.", **fields))


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("asked", [True, False], ids=["usage asked", "not asked"])
def test_a_stream_arrives_as_the_engine_sent_it(
    stub: StubEngine, gateway: Server, stream: bytes, pieces: int | str, asked: bool
) -> None:
    stub.script = Script(cut(stream, pieces))
    options = {"stream_options": {"include_usage": True}} if asked else {}
    assert post(gateway, stream=True, **options).content == stream


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize(
    ("options", "withheld"),
    [
        ({}, True),
        ({"stream_options": None}, True),
        ({"stream_options": {}}, True),
        ({"stream_options": {"include_usage": False}}, True),
        ({"stream_options": {"include_usage": True}}, False),
    ],
    ids=str,
)
def test_the_usage_event_is_for_those_who_asked(
    stub: StubEngine, gateway: Server, options: dict[str, Any], withheld: bool, line_end: bytes
) -> None:
    sent = [part.replace(b"\n", line_end) for part in (HELLO[1], USAGE_EVENT, DONE)]
    expected = sent[:1] + sent[2:] if withheld else sent
    for pieces in PIECES:
        stub.script = Script(cut(b"".join(sent), pieces))
        assert post(gateway, stream=True, **options).content == b"".join(expected)
    asked = json.loads(stub.received[-1].body)["stream_options"]
    assert asked["include_usage"] is True  # the gateway wants to know in any case


def test_a_body_that_needs_no_change_is_not_changed(stub: StubEngine, gateway: Server) -> None:
    stub.script = Script([WHOLE], headers=JSON)
    body = (
        b' {"messages" : [{"role":"user","content":"\\u00fc \xc3\xbc"}],\n"vendor":{"b":1.10,"a":[1e400,-0]},'
        b'"model":"demo","vendor":{"twice":true}, "n":1}\t'
    )
    response = gateway.post("/v1/chat/completions", content=body)
    assert response.content == WHOLE
    assert stub.received[-1].body == body


VENDOR_FIELDS = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": [1.0, 1e-7]}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "logprobs": True,
    "top_logprobs": 5,
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
    "n": 2,
    "stop": ["\n\n", "ü"],
    "seed": 2**62,
    "temperature": 0.30,
    "logit_bias": {"50256": -100},
    "user": None,
    "guided_regex": "[a-z]+\\d",
    "vendor": {"deep": [{"er": "x"}], "big": 12345678901234567890123, "é": "🌍"},
}


def in_order(body: bytes) -> list[tuple[str, Any]]:
    """A JSON object's members as they stand there; numbers as text, so that none is equal by rounding."""
    members: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list, parse_float=str, parse_int=str)
    return members


@pytest.mark.parametrize("added", [{}, {"plait": {"priority": 3}}], ids=["as it is", "with annotations"])
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False, "x": [1]}], ids=str)
def test_unknown_fields_reach_the_engine_in_place(
    stub: StubEngine, gateway: Server, options: dict[str, Any] | None, added: dict[str, Any]
) -> None:
    stub.script = Script([DONE])
    request = asking("Hello.") | added | {"stream": True, "stream_options": options} | VENDOR_FIELDS
    sent = json.dumps(request).encode()
    assert gateway.post("/v1/chat/completions", content=sent).status_code == 200
    expected = request | {"stream_options": (options or {}) | {"include_usage": True}}
    expected.pop("plait", None)
    assert in_order(stub.received[-1].body) == in_order(json.dumps(expected).encode())


def test_what_the_sdk_sends_reaches_the_engine(stub: StubEngine, gateway: Server) -> None:
    stub.script = Script([*HELLO, DONE])
    extra = {"plait": {"objective": "latency"}, "ignore_eos": True, "vllm_xargs": {"k": "v"}}
    fields = {name: value for name, value in VENDOR_FIELDS.items() if name not in {"guided_regex", "vendor", "n"}}
    request: dict[str, Any] = asking("Hello.", stream=True, extra_body=extra, **fields)
    with sync_client(gateway) as client:
        assert [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**request)] == [
            "Hello", " wörld 🌍", ".", None
        ]  # fmt: skip
    received = json.loads(stub.received[-1].body)
    assert received.pop("stream_options") == {"include_usage": True}
    del request["extra_body"]
    assert received == request | {"ignore_eos": True, "vllm_xargs": {"k": "v"}}


def test_headers_pass_except_those_that_are_not_the_engines(stub: StubEngine, gateway: Server) -> None:
    stub.script = Script([WHOLE], headers=JSON)
    headers = {
        "plait-priority": "5", "plait-slo-ttft-ms": "100", "authorization": "Bearer client", "x-request-id": "r-1",
        "traceparent": "kept", "accept-encoding": "gzip", "content-type": "application/json", "te": "trailers",
    }  # fmt: skip
    gateway.post("/v1/chat/completions", content=json.dumps(asking("Hello.")), headers=headers)
    received = stub.received[-1].headers
    assert not [name for name in received if name.startswith("plait-")]
    assert "te" not in received
    assert received["accept-encoding"] == "identity"
    kept = ("authorization", "x-request-id", "traceparent", "content-type")
    assert {name: received[name] for name in kept} == {name: headers[name] for name in kept}
    assert received["host"] == stub.url.removeprefix("http://")


def test_a_chunked_request_reaches_the_engine(stub: StubEngine, gateway: Server) -> None:
    stub.script = Script([WHOLE], headers=JSON)
    body = json.dumps(asking("Hello.")).encode()
    assert gateway.post("/v1/chat/completions", content=iter(cut(body, 9))).status_code == 200
    assert stub.received[-1].body == body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_is_no_stream_has_the_form_that_was_asked(
    stub: StubEngine, gateway: Server, stream: bool
) -> None:
    stub.script = Script(cut(WHOLE, 20), headers=(*JSON, ("OpenAI-Version", "kept")))
    response = post(gateway, stream=stream)
    assert response.status_code == 200
    if stream:
        events = response.text.split("\n\n")
        [*_, last] = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert last["choices"][0]["finish_reason"] == "stop"
        assert events[-2:] == ["data: [DONE]", ""]
        assert response.headers["content-type"].startswith("text/event-stream")
    else:
        assert response.content == WHOLE
    assert (response.headers["openai-version"], response.headers["plait-engine"]) == ("kept", "stub")


@pytest.mark.parametrize("status", [400, 404, 422])
def test_the_callers_error_passes_in_openais_shape(stub: StubEngine, gateway: Server, status: int) -> None:
    whole = b'{"error":  {"message":"from the engine \xc3\xbc", "code": 7}}'
    flat = b'{"object":"error",  "message":"from the engine \xc3\xbc"}'
    for body in (whole, flat):
        stub.script = Script(cut(body, 20), status, JSON)
        response = post(gateway)
        assert (response.status_code, response.json()["error"]["message"]) == (status, "from the engine ü")
        assert response.content == whole or body is flat


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_engines_error_is_told_in_openais_shape_with_a_time_to_come_back(
    stub: StubEngine, gateway: Server, status: int
) -> None:
    stub.script = Script([b"<html>http://10.0.0.7</html>"], status, (("Retry-After", "7"),))
    response = post(gateway)
    assert (response.status_code, response.headers["retry-after"]) == (status, "7")
    assert response.json()["error"]["message"] == f"engine stub answered with status {status}"


def test_text_completions_have_their_own_path(stub: StubEngine, gateway: Server) -> None:
    stub.script = Script([WHOLE], headers=JSON)
    gateway.post("/v1/completions", json={"model": "demo", "prompt": [1, 2, 3]})
    assert stub.received[-1].path == "/v1/completions"
    assert json.loads(stub.received[-1].body) == {"model": "demo", "prompt": [1, 2, 3]}


BREAKS = {"cut": (502, "engine_error"), "silence": (504, "engine_timeout")}
"""How an engine can stop in the middle, and the gateway's words for it."""


@pytest.mark.parametrize("ending", BREAKS)
def test_a_stream_that_breaks_ends_with_an_error_event(stub: StubEngine, hasty: Server, ending: str) -> None:
    stub.script = Script([*HELLO, b'data: {"half'], ending=ending)
    whole, _, error = post(hasty, stream=True).content.rpartition(b"data: ")
    assert whole == b"".join(HELLO)
    assert json.loads(error)["error"]["code"] == BREAKS[ending][1]
    assert error.endswith(b"}\n\n")


def test_the_sdk_raises_a_broken_streams_error_after_its_text(stub: StubEngine, gateway: Server) -> None:
    stub.script = Script([*HELLO, b'data: {"half'], ending="cut")
    with sync_client(gateway) as client:
        stream = client.chat.completions.create(**asking("Hello.", stream=True))
        assert [next(stream).choices[0].delta.content for _ in HELLO] == ["Hello", " wörld 🌍", "."]
        with pytest.raises(openai.APIError, match="engine") as caught:
            next(stream)
    assert (caught.value.code, caught.value.type) == ("engine_error", "engine_error")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ending", BREAKS)
def test_an_engine_lost_before_its_answer_is_an_error_status(
    stub: StubEngine, hasty: Server, ending: str, stream: bool
) -> None:
    stub.script = Script(headers=EVENT_STREAM if stream else JSON, ending=ending)
    response = post(hasty, stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == BREAKS[ending]
    assert response.headers["x-should-retry"] == "true"


def test_every_call_of_this_module_was_counted_and_has_ended(stub: StubEngine, gateway: Server) -> None:
    before = gateway.metric("plait_calls_total")
    stub.script = Script([*HELLO, USAGE_EVENT, DONE])
    post(gateway, stream=True)
    eventually(lambda: gateway.metric("plait_calls_total") == before + 1)
    assert gateway.metric("plait_calls_total", outcome="ok") > 0
    assert gateway.metric("plait_engine_outstanding_calls") == 0
