"""The completion routes up to the relay: which requests become calls, as what, and how the others are refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from plait.backends.errors import EngineError
from plait.gateway.api.call_api import CompletionApi
from plait.gateway.asgi import ClientGoneError
from plait.gateway.calls.call_reader import OFF_LOOP_BYTES, PromptReader
from plait.gateway.fleet.served_models import ModelNames
from plait.gateway.intake import turns
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.types import Objective, Slo
from tests.gateway.api.fake_relay import CHAT, HI, MAX_BODY_BYTES, TEXT, Api, FakeRelay, body_for, in_task
from tests.gateway.server.fake_connection import FakeConnection


async def test_a_chat_becomes_a_call_over_the_models_own_tokens(api: Api) -> None:
    asked = await api.asked(CHAT, {"messages": [{"role": "user", "content": "hello " * 400}]})
    call = asked.call
    assert (call.model, call.block_tokens, call.slo) == ("m", 64, Slo())
    assert call.prompt_tokens > 400
    assert len(call.block_hashes) == call.prompt_tokens // 64
    assert asked.path == CHAT


async def test_token_ids_are_hashed_as_they_are(api: Api) -> None:
    ids = list(range(130))
    asked = await api.asked(TEXT, {"prompt": ids})
    assert asked.call.prompt_tokens == 130
    assert list(asked.call.block_hashes) == list(chain(ids, 64, root_hash("m")))


async def test_of_several_prompts_the_first_is_matched_and_all_are_counted(api: Api) -> None:
    asked = await api.asked(TEXT, {"prompt": [list(range(130)), list(range(700)), list(range(900))]})
    assert asked.call.prompt_tokens == 1_730
    assert list(asked.call.block_hashes) == list(chain(range(130), 64, root_hash("m")))


async def test_a_large_body_is_read_the_same_way(api: Api) -> None:
    body = {"prompt": list(range(100)), "padding": "x" * OFF_LOOP_BYTES}
    large = await api.asked(TEXT, body)
    small = await api.asked(TEXT, {"prompt": list(range(100))})
    assert list(large.call.block_hashes) == list(small.call.block_hashes)


async def test_content_that_is_not_text_is_served_without_a_prefix(api: Api) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    asked = await api.asked(CHAT, {"messages": [{"role": "user", "content": [picture]}]})
    assert (asked.call.prompt_tokens, list(asked.call.block_hashes)) == (0, [])


async def test_annotations_reach_the_call(api: Api) -> None:
    headers = {"plait_slo_ttft_ms": "250", "plait_objective": "latency", "plait_priority": "-3", "x_request_id": "mine"}
    call = (await api.asked(CHAT, {"messages": HI, "plait": {"slo_tpot_ms": 40}}, **headers)).call
    assert (call.slo, call.objective, call.priority, call.call_id) == (Slo(0.25, 0.04), Objective.LATENCY, -3, "mine")


async def test_a_label_is_echoed_and_makes_no_session(api: Api) -> None:
    asked = await api.asked(CHAT, {"messages": HI}, plait_session="s1")
    assert asked.session == "s1"
    assert list(api.executor.sessions) == []


async def test_a_call_without_an_id_gets_one(api: Api) -> None:
    ids = {(await api.asked(CHAT, {"messages": HI})).call.call_id for _ in range(2)}
    assert len(ids) == 2
    assert all(len(request_id) == 32 for request_id in ids)


@pytest.mark.parametrize(
    ("path", "body", "refusal"),
    [
        (CHAT, b"", (400, "invalid_json", None)),
        (CHAT, b"{", (400, "invalid_json", None)),
        (CHAT, b"\xff", (400, "invalid_json", None)),
        (CHAT, b"[]", (400, None, None)),
        (CHAT, b'{"messages": []}', (400, None, "model")),
        (CHAT, {}, (400, None, "messages")),
        (CHAT, {"messages": []}, (400, None, "messages")),
        (CHAT, {"messages": "hi"}, (400, None, "messages")),
        (CHAT, {"messages": HI, "model": 3}, (400, None, "model")),
        (CHAT, {"messages": HI, "max_tokens": 0, "plait": {"session": "s", "output": "a"}}, (400, None, "max_tokens")),
        (CHAT, {"messages": HI, "n": 1_000, "plait": {"session": "s", "inputs": "a"}}, (400, None, "n")),
        (CHAT, {"messages": HI, "model": ""}, (400, None, "model")),
        (CHAT, {"messages": HI, "stream": "yes"}, (400, None, "stream")),
        (CHAT, {"messages": HI, "plait": {"priority": "high"}}, (400, "invalid_annotation", "plait.priority")),
        (CHAT, {"messages": HI, "plait": {"prio": 1}}, (400, "invalid_annotation", "plait.prio")),
        (CHAT, {"messages": HI, "plait": {"output": "code"}}, (400, "invalid_annotation", "plait-session")),
        (CHAT, {"messages": HI, "plait": {"inputs": "a,b"}}, (400, "invalid_annotation", "plait-session")),
        (CHAT, {"messages": HI, "n": 2, "plait": {"session": "s", "output": "code"}}, (400, None, "n")),
        (TEXT, {"prompt": ["a", "b"], "plait": {"session": "s", "output": "code"}}, (400, None, "n")),
        (
            CHAT,
            {"messages": HI, "plait": {"session": "s", "output": "a", "inputs": "a"}},
            (409, "cycle", "plait-inputs"),
        ),
        (
            CHAT,
            {"messages": HI, "plait": {"session": "s", "output": "code; transform=cod_block"}},
            (400, "invalid_transform", None),
        ),
        (
            CHAT,
            {"messages": HI, "model": "other", "plait": {"session": "s", "inputs": "a"}},
            (404, "model_not_found", "model"),
        ),
        (CHAT, {"messages": HI, "max_tokens": 1_000}, (400, "context_length_exceeded", "messages")),
        (CHAT, {"messages": HI, "model": "other"}, (404, "model_not_found", "model")),
        (TEXT, {"prompt": "x", "model": "other"}, (404, "model_not_found", "model")),
        (TEXT, {"prompt": []}, (400, None, "prompt")),
        (TEXT, {"prompt": [1, "x"]}, (400, None, "prompt")),
        (TEXT, {"prompt": [2**32]}, (400, None, "prompt")),
        (TEXT, {"prompt": list(range(1_000))}, (400, "context_length_exceeded", "prompt")),
        (TEXT, b" " * (MAX_BODY_BYTES + 1), (413, "body_too_large", None)),
    ],
)
async def test_a_bad_request_never_reaches_an_engine(
    api: Api, path: str, body: Any, refusal: tuple[int, str | None, str | None]
) -> None:
    response = await api.post(path, body, x_request_id="mine")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == refusal, error["message"]
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-request-id"] == "mine"
    assert response.headers.get("x-should-retry", "false") == "false"
    assert api.relay.deliveries == []
    assert api.no_calls.statuses == [response.status_code]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "max_tokens": 5.0}),
        (CHAT, {"messages": HI, "max_tokens": 0}),
        (CHAT, {"messages": HI, "n": 1_000}),
        (CHAT, {"messages": HI, "n": "two", "stop": 1, "seed": "x", "logprobs": 7, "tool_choice": 5}),
        (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}),
        (TEXT, {"prompt": "x", "max_tokens": 0, "echo": True}),
        (TEXT, {"prompt": None, "prompt_embeds": "AAAA"}),
        (TEXT, {"max_tokens": 1}),
    ],
)
async def test_what_placement_does_not_need_is_left_to_the_engine(api: Api, path: str, body: Any) -> None:
    asked = await api.asked(path, body)
    assert asked.choices == 1
    assert asked.call.output_limit in {None, 1, 5}
    assert asked.body.original == json.dumps({"model": "m", **body}).encode()


async def test_a_missing_model_is_the_only_one(prompts: PromptReader) -> None:
    api = Api(prompts)
    api.router.health.answered("a", {"m": 1_000, "adapter": 1_000}, {"adapter": "m"})
    api.router.models.given = ModelNames(aliases={"gpt": "m"})
    for named in ({}, {"model": "default"}, {"model": "gpt"}, {"model": None}):
        body = {"messages": HI} | named
        response = await api.http.post(CHAT, json={key: value for key, value in body.items() if value is not None})
        assert response.status_code == 200, response.text
        asked = api.relay.deliveries[-1]
        assert asked.call.model == "m"
        assert json.loads(body_for(asked))["model"] == "m"
    await api.http.aclose()


async def test_a_fallback_answers_while_no_engine_takes_calls_for_the_model(api: Api) -> None:
    assert (await api.post(CHAT, {"messages": HI, "model": "down"})).status_code == 503
    api.router.models.given = ModelNames(["down"], fallbacks={"down": ["other", "m"]})
    asked = await api.asked(CHAT, {"messages": HI, "model": "down"})
    assert asked.call.model == "m"


async def test_only_posts(api: Api) -> None:
    response = await api.http.get(CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_allowed"


async def test_a_model_that_no_engine_serves_right_now_is_worth_a_retry(api: Api) -> None:
    response = await api.post(CHAT, {"messages": HI, "model": "down"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_engine_available")
    assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("1", "true")


async def test_the_context_is_only_checked_over_tokens_that_are_the_engines(api: Api) -> None:
    await api.asked(TEXT, {"prompt": "x" * 5_000, "model": "bytes"})
    await api.asked(TEXT, {"prompt": list(range(999))})


async def test_an_engine_lost_before_the_first_byte_is_a_bad_gateway(api: Api) -> None:
    api.relay.error = EngineError("engine lost")
    response = await api.post(CHAT, {"messages": HI})
    assert (response.status_code, response.json()["error"]["type"]) == (502, "engine_error")
    assert response.headers["x-should-retry"] == "true"


async def test_nobody_is_answered_who_has_gone(api: Api) -> None:
    api.relay.error = ClientGoneError()
    with pytest.raises(AssertionError):  # of the test's own transport, which got no answer
        await api.post(CHAT, {"messages": HI})


async def test_a_defect_as_a_call_is_read_gives_its_body_back(
    prompts: PromptReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, defect, ended = Api(prompts, begins=True), RuntimeError("a defect"), list[BaseException | None]()

    def raising(*_: object) -> None:
        assert api.bodies.bytes_of("") > 0
        raise defect

    monkeypatch.setattr(CompletionApi, "read", raising)
    connection, body = FakeConnection(), b'{"model": "m", "prompt": "hi"}'
    scope = {"type": "http", "method": "POST", "path": TEXT, "headers": []}
    assert api.app.begin(scope, body, connection.client, ended.append, in_task) is not None
    assert (ended, api.bodies.bytes_of(""), api.bodies.requests_of("")) == ([defect], 0, 0)
    await api.http.aclose()


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_call_that_is_ended_from_outside_gives_its_body_back(
    prompts: PromptReader, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """Its client goes, or the gateway stops, which does not have to be told."""
    api, ended, cancelled = Api(prompts, begins=True), list[BaseException | None](), list[object]()
    monkeypatch.setattr(FakeRelay, "begin", lambda *_: "a delivery")
    monkeypatch.setattr(FakeRelay, "cancel", lambda _, delivery: cancelled.append(delivery), raising=False)
    connection, body = FakeConnection(), b'{"model": "m", "prompt": "hi"}'
    scope = {"type": "http", "method": "POST", "path": TEXT, "headers": []}
    call = api.app.begin(scope, body, connection.client, ended.append, in_task)
    assert call is not None
    assert api.bodies.bytes_of("") > 0
    assert api.bodies.requests_of("") == 1
    if leaves:
        connection.client.gone()
    else:
        call.cancel()
    assert (ended, cancelled) == ([None] * leaves, ["a delivery"])
    assert (api.bodies.bytes_of(""), api.bodies.requests_of("")) == (0, 0)
    assert connection.client.on_gone is None
    await api.http.aclose()


class Waiting:
    """A call that waits for its turn, since another key has used this pass of the event loop."""

    def __init__(self, prompts: PromptReader, monkeypatch: pytest.MonkeyPatch, *headers: tuple[bytes, bytes]) -> None:
        monkeypatch.setattr(turns, "LONG_PASS_S", 0.01)
        self.api, self.ended, self.tasks = Api(prompts, begins=True), list[BaseException | None](), list[str]()
        self.connection = FakeConnection()
        assert self.api.bodies.turns.may_begin("other")
        self.api.bodies.turns.charge("other", 1.0)
        scope = {"type": "http", "method": "POST", "path": TEXT, "headers": list(headers)}
        call = self.api.app.begin(
            scope,
            b'{"model": "m", "prompt": "hi"}',
            self.connection.client,
            self.ended.append,
            lambda: self.tasks.append("a task"),
        )
        assert call is not None
        self.call = call
        assert (self.ended, self.api.bodies.bytes_of(""), self.api.bodies.turns._turns.length) == ([], 0, 1)

    async def passes(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        assert (self.api.bodies.bytes_of(""), self.api.bodies.requests_of("")) == (0, 0)
        assert self.connection.client.on_gone is None
        assert self.api.bodies.turns._turns.length == 0
        await self.api.http.aclose()


async def test_a_call_waits_for_its_turn_without_a_task(prompts: PromptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(prompts, monkeypatch)
    await waiting.passes()
    assert (waiting.ended, waiting.tasks) == ([None], [])
    assert b"HTTP/1.1 200 " in b"".join(waiting.connection.transport.written)


async def test_a_call_that_turns_out_to_need_a_task_gets_one_after_its_wait(
    prompts: PromptReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(prompts, monkeypatch, (b"plait-session", b"s"))
    await waiting.passes()
    assert (waiting.ended, waiting.tasks) == ([], ["a task"])


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_call_that_is_ended_from_outside_waits_no_longer(
    prompts: PromptReader, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    waiting = Waiting(prompts, monkeypatch)
    if leaves:
        waiting.connection.client.gone()
    else:
        waiting.call.cancel()
    await waiting.passes()
    assert (waiting.ended, waiting.tasks) == ([None] * leaves, [])
    assert waiting.connection.transport.written == []
    assert waiting.api.no_calls.statuses == [499 if leaves else 503]


async def test_a_call_that_waits_too_long_is_refused(prompts: PromptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(prompts, monkeypatch)
    monkeypatch.setattr(turns, "STANDING_S", -1.0)
    monkeypatch.setattr(turns, "MOST_WAIT_S", -1.0)
    await waiting.passes()
    assert waiting.ended == [None]
    assert b"gateway_busy" in b"".join(waiting.connection.transport.written)


async def test_a_defect_of_a_call_that_has_waited_is_told(
    prompts: PromptReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, defect = Waiting(prompts, monkeypatch), RuntimeError("a defect")

    def raising(*_: object) -> None:
        raise defect

    monkeypatch.setattr(CompletionApi, "read", raising)
    await waiting.passes()
    assert waiting.ended == [defect]


async def test_a_request_is_refused_while_most_connections_are_in_use_by_its_key(api: Api) -> None:
    api.bodies.serve(connections=8)
    for _ in range(7):
        api.bodies.add("", 0, 1)
    response = await api.post(CHAT, {"messages": HI})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_open_requests")
    assert (response.headers["connection"], response.headers["retry-after"]) == ("close", "1")
    api.bodies.remove("", 0, 1)
    for _ in range(3):
        assert (await api.post(CHAT, {"messages": HI})).status_code == 200
    assert api.bodies.requests_of("") == 6


async def test_a_key_is_asked_for_before_anything_is_read(prompts: PromptReader) -> None:
    api = Api(prompts, "secret")
    response = await api.post(CHAT, b"not even JSON")
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    assert (await api.post(CHAT, {"messages": HI}, authorization="Bearer secret")).status_code == 200
    await api.http.aclose()
