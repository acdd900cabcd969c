"""Requests that are the caller's mistake: each is refused in OpenAI's shape, by the field at fault, without a retry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from e2e.conftest import CONTEXT_TOKENS, MAX_BODY_BYTES
from e2e.sdk import Sdk, asking, async_client, sync_client
from e2e.server_process import Server
from e2e.servers import Fleet

SLO_HEADERS = ["plait-slo-ttft-ms", "plait-slo-tpot-ms", "plait-slo-jct-ms", "x-slo-ttft-ms", "x-llm-d-slo-tpot-ms"]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of a refusal, checked to be one that OpenAI's clients understand."""
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model_not_found", "model"),
        ({"messages": []}, openai.BadRequestError, None, "messages"),
        ({"messages": "hello"}, openai.BadRequestError, None, "messages"),
        ({"max_tokens": "many"}, openai.BadRequestError, None, "max_tokens"),
        ({"max_tokens": 0}, openai.BadRequestError, None, "max_tokens"),
        ({"max_completion_tokens": -1}, openai.BadRequestError, None, "max_completion_tokens"),
        ({"n": 0}, openai.BadRequestError, None, "n"),
        ({"n": 1.5}, openai.BadRequestError, None, "n"),
        ({"stop": 5}, openai.BadRequestError, None, "stop"),
        ({"seed": "x"}, openai.BadRequestError, None, "seed"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, None, "stream_options"),
        ({"tools": {"type": "function"}}, openai.BadRequestError, None, "tools"),
        ({"max_tokens": 10_000_000}, openai.BadRequestError, "context_length_exceeded", "messages"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
async def test_a_bad_field_is_named(
    sdk: Sdk, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str | None, param: str
) -> None:
    with pytest.raises(kind) as caught:
        await sdk.chat(**{**asking("Hello."), **fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("prompt", ["", [], [1, "two"], [[1], "two"], [-1], 5, {"text": "x"}], ids=json.dumps)
async def test_a_prompt_that_is_none_is_refused(sdk: Sdk, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.text(model="demo", prompt=prompt, max_tokens=4)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b'{"model": "demo", "messages": [}', "invalid_json", None),
        (b'{"model": "demo", "messages": [{"role": "user", "content": "\xff"}]}', "invalid_json", None),
        (b"[]", None, None),
        (b"null", None, None),
        (b"{}", None, "messages"),
        (b'{"model": "demo"}', None, "messages"),
        (b'{"model": 5, "messages": [{"role": "user", "content": "x"}]}', None, "model"),
        (b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": "yes"}', None, "stream"),
        (b'{"model": "demo", "messages": ["x"]}', None, "messages"),
    ],
    ids=lambda value: ascii(value.decode("latin-1")) if isinstance(value, bytes) else "",
)
def test_a_broken_body_is_refused(server: Server, body: bytes, code: str | None, param: str | None) -> None:
    response = server.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")


@pytest.fixture(params=["gateway", "engine"])
def small(request: pytest.FixtureRequest, fleet: Fleet) -> Server:
    """Where the model with the short context is served."""
    return fleet.gateway if request.param == "gateway" else fleet.engines["small-1"]


def test_a_prompt_longer_than_the_context_is_refused(small: Server) -> None:
    with sync_client(small) as client:
        for fields in ({"max_tokens": 4}, {"max_tokens": 4, "stream": True}):
            with pytest.raises(openai.BadRequestError, match=str(CONTEXT_TOKENS)) as caught:
                client.chat.completions.create(**{**asking("word " * 2 * CONTEXT_TOKENS), "model": "small", **fields})
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(("prompt_tokens", "fits"), [(CONTEXT_TOKENS - 4, True), (CONTEXT_TOKENS - 3, False)])
def test_prompt_and_output_may_just_fill_the_context(small: Server, prompt_tokens: int, fits: bool) -> None:
    request = {"model": "small", "prompt": [7] * prompt_tokens, "max_tokens": 4}
    response = small.post("/v1/completions", json=request)
    if fits:
        assert response.json()["usage"] == response.json()["usage"] | {"total_tokens": CONTEXT_TOKENS}
    else:
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")


def _pieces(count: int) -> Iterator[bytes]:
    yield from (b"x" * 1024 for _ in range(count))


@pytest.mark.parametrize("times", [1, 32], ids=["just over", "far over"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length declared", "chunked"])
def test_an_oversized_body_is_refused(fleet: Fleet, times: int, chunked: bool) -> None:
    pieces = times * MAX_BODY_BYTES // 1024 + 1
    body = _pieces(pieces) if chunked else b"x" * (pieces * 1024)
    response = fleet.gateway.post("/v1/chat/completions", content=body)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


async def test_the_sdk_sees_an_oversized_body_as_a_status_error(fleet: Fleet) -> None:
    async with async_client(fleet.gateway) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**asking("x" * MAX_BODY_BYTES))
        assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
        assert (await client.chat.completions.create(**asking("x" * 1024))).choices


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/chat/completions/", "/v1", "/v1/engines/demo", "/docs"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_unknown_path_is_not_found(fleet: Fleet, method: str, path: str) -> None:
    response = fleet.gateway.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


def test_an_unknown_model_is_not_described(fleet: Fleet) -> None:
    with sync_client(fleet.gateway) as client, pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_completions_are_posted(fleet: Fleet, method: str, path: str) -> None:
    response = fleet.gateway.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("header", SLO_HEADERS)
@pytest.mark.parametrize("value", ["fast", "-5", "0", "", "nan", "1e999", "5 ms"])
def test_a_bad_objective_is_named(fleet: Fleet, header: str, value: str) -> None:
    with sync_client(fleet.gateway) as client, pytest.raises(openai.BadRequestError, match=header) as caught:
        client.chat.completions.create(**asking("Hello."), extra_headers={header: value})
    assert caught.value.param == header


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({"plait-priority": "high"}, None, "plait-priority"),
        ({"plait-objective": "speed"}, None, "plait-objective"),
        ({"plait-sesion": "a"}, None, "plait-sesion"),
        ({}, {"slo-ttft-ms": "fast"}, "plait.slo-ttft-ms"),
        ({}, {"ttft": 5}, "plait.ttft"),
        ({}, "latency", "plait"),
        ({"plait-priority": "1"}, {"priority": 2}, "plait-priority"),
    ],
    ids=str,
)
def test_a_bad_annotation_is_named(fleet: Fleet, headers: dict[str, str], body: Any, param: str) -> None:
    fields: dict[str, Any] = {} if body is None else {"extra_body": {"plait": body}}
    with sync_client(fleet.gateway) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asking("Hello."), extra_headers=headers, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["plait-output", "plait-inputs"])
def test_semantic_variables_need_a_session(fleet: Fleet, name: str) -> None:
    with sync_client(fleet.gateway) as client, pytest.raises(openai.BadRequestError, match=name) as caught:
        client.chat.completions.create(**asking("Hello."), extra_headers={name: "code"})
    assert caught.value.param == "plait-session"


def test_good_annotations_are_accepted(fleet: Fleet) -> None:
    headers = dict.fromkeys(SLO_HEADERS[:3], "250") | {"plait-priority": "-1", "plait-objective": "latency"}
    annotations = {"slo-ttft-ms": 250, "session": "s-1"}
    with sync_client(fleet.gateway) as client:
        answer = client.chat.completions.create(
            **asking("Hello."), extra_headers=headers, extra_body={"plait": annotations}
        )
    assert answer.choices
