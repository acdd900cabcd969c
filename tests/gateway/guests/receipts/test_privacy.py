"""No text of a request is told in logs, metrics, receipts, spans or the live page: a marker is in each field.

Only an engine's own words, which may quote a prompt, are in operators' receipts. Names are told: of sessions and
variables, request ids, models that are served, and in receipts and on the live page of agents.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from opentelemetry.sdk.resources import Resource
from structlog.testing import capture_logs

from plait.gateway.guests.receipts.receipts import Receipts
from plait.gateway.guests.receipts.view import shown
from plait.gateway.guests.receipts.words import sentences
from plait.gateway.guests.tracing.spans import EndedCall, spans_of
from tests.gateway.api.served_gateway import ANSWER, CHAT, EngineAnswer, Reply, Served, request
from tests.gateway.exposed import exposed_text
from tests.gateway.guests.receipts.asked_gateway import fleet, get
from tests.waiting import WITHIN_S

MARK: Final = f"marker-{secrets.token_hex(8)}"
TEXT: Final = [{"role": "user", "content": "hello"}]
COMPLETIONS, MESSAGES, RESPONSES = "/v1/completions", "/v1/messages", "/v1/responses"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
PROGRAMS, SUBMIT, VARIABLES = "/v1/programs", "/v1/submit", "/v1/variables"
TOLD_AFTER_S: Final = 0.7
"""The live page tells of calls twice a second."""

FUNCTION: Final = {"name": MARK, "arguments": MARK}
IN_SESSION: Final = ("plait-session: s",)


def of_role(role: str, **more: object) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": MARK, **more}]}


def part(**fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def tool(**fields: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def schema(**fields: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}, **fields}}}


def call(text: str = "hello", **fields: object) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def submitted(text: str, **fields: object) -> dict[str, Any]:
    return {"model": "m", "prompt": f"{text} {{{{out}}}}", "placeholders": [{"name": "out", "in_out": True}], **fields}


CASES: Final[dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]] = {
    **{f"message of {role}": (CHAT, of_role(role), ()) for role in ("system", "developer", "user", "assistant", MARK)},
    "message of a tool": (CHAT, of_role("tool", tool_call_id=MARK), ()),
    "name of a message": (CHAT, of_role("user", name=MARK), ()),
    "arguments of a tool call": (
        CHAT,
        of_role("assistant", tool_calls=[{"id": MARK, "type": "function", "function": FUNCTION}]),
        (),
    ),
    "wrong tool calls": (CHAT, of_role("assistant", tool_calls=MARK), ()),
    "wrong messages": (CHAT, {"messages": MARK}, ()),
    "wrong message": (CHAT, {"messages": [MARK]}, ()),
    "text part": (CHAT, part(type="text", text=MARK), ()),
    "image part": (CHAT, part(type="image_url", image_url={"url": f"data:image/png;base64,{MARK}"}), ()),
    "kind of a part": (CHAT, part(type=MARK), ()),
    "name of a tool": (CHAT, tool(name=MARK), ()),
    "description of a tool": (CHAT, tool(description=MARK), ()),
    "parameters of a tool": (CHAT, tool(parameters={"type": "object", "properties": {MARK: {"enum": [MARK]}}}), ()),
    "wrong tools": (CHAT, {"tools": MARK}, ()),
    "choice of a tool": (CHAT, {**tool(), "tool_choice": {"type": "function", "function": {"name": MARK}}}, ()),
    "wrong choice of a tool": (CHAT, {"tool_choice": MARK}, ()),
    "schema": (CHAT, schema(schema={"type": MARK, "description": MARK}), ()),
    "name of a schema": (CHAT, schema(name=MARK), ()),
    "response format": (CHAT, {"response_format": {"type": MARK}}, ()),
    "wrong response format": (CHAT, {"response_format": MARK}, ()),
    "guided regex": (CHAT, {"guided_regex": MARK, "structured_outputs": {"regex": MARK}}, ()),
    "guided grammar": (CHAT, {"guided_grammar": MARK, "structured_outputs": {"grammar": MARK}}, ()),
    "stop": (CHAT, {"stop": [MARK]}, ()),
    "wrong stop": (CHAT, {"stop": {MARK: 1}}, ()),
    "metadata": (CHAT, {"metadata": {MARK: MARK}}, ()),
    "user": (CHAT, {"user": MARK}, ()),
    "wrong user": (CHAT, {"user": [MARK]}, ()),
    "logit bias": (CHAT, {"logit_bias": {MARK: 1}}, ()),
    "wrong number": (CHAT, {"max_tokens": MARK}, ()),
    "field that is not known": (CHAT, {MARK: MARK}, ()),
    "chat template": (CHAT, {"chat_template": MARK, "chat_template_kwargs": {"a": MARK}}, ()),
    "cache salt": (CHAT, {"cache_salt": MARK}, ()),
    "unknown model": (CHAT, {"model": MARK}, ()),
    "wrong model": (CHAT, {"model": [MARK]}, ()),
    "prompt": (COMPLETIONS, {"prompt": MARK, "suffix": MARK}, ()),
    "wrong prompt": (COMPLETIONS, {"prompt": {MARK: MARK}}, ()),
    "input with a transform": (CHAT, call("{{v}}"), (*IN_SESSION, "plait-inputs: v")),
    "output": (CHAT, call(MARK), (*IN_SESSION, "plait-output: out")),
    "wrong output": (CHAT, {}, (*IN_SESSION, f"plait-output: {MARK} {MARK}")),
    "transform": (CHAT, {}, (*IN_SESSION, f"plait-output: o2; transform=regex {MARK}")),
    "condition": (CHAT, call("{{v}}"), (*IN_SESSION, "plait-inputs: v", f'plait-when: v == "{MARK}"')),
    "wrong condition": (CHAT, {}, (*IN_SESSION, f"plait-when: {MARK}")),
    "wrong annotation": (CHAT, {"plait": {MARK: MARK}}, ()),
    "wrong objective": (CHAT, {"plait": {"objective": MARK}}, ()),
    "wrong time": (CHAT, {}, (f"x-slo-ttft-ms: {MARK}",)),
    "session of a client": (CHAT, {"prompt_cache_key": MARK, "safety_identifier": MARK}, ()),
    "trace": (CHAT, {}, (f"traceparent: 00-{MARK:x<32}-{'0' * 16}-01",)),
    "cookie": (CHAT, {}, (f"cookie: {MARK}", f"user-agent: {MARK}")),
    "instructions": (RESPONSES, {"input": MARK, "instructions": MARK}, ()),
    "items of input": (RESPONSES, {"input": [{"role": "user", "content": MARK}]}, ()),
    "wrong input": (RESPONSES, {"input": [{"type": MARK, MARK: MARK}]}, ()),
    "response before": (RESPONSES, {"input": "x", "previous_response_id": MARK}, ()),
    "system": (MESSAGES, {"messages": TEXT, "system": MARK, "max_tokens": 5}, ()),
    "blocks": (MESSAGES, {**part(type="text", text=MARK), "max_tokens": 5, "metadata": {"user_id": MARK}}, ()),
    "wrong blocks": (MESSAGES, {**part(type=MARK, text=MARK), "max_tokens": 5}, ()),
    "wrong system": (MESSAGES, {"messages": TEXT, "system": {MARK: 1}, "max_tokens": 5}, ()),
    "texts to embed": (EMBEDDINGS, {"input": [MARK]}, ()),
    "wrong texts to embed": (EMBEDDINGS, {"input": {MARK: 1}, "plait": {"inputs": [MARK]}}, ()),
    "documents": (RERANK, {"query": MARK, "documents": [MARK]}, ()),
    "wrong documents": (RERANK, {"query": [MARK], "documents": MARK}, ()),
    "value": (VARIABLES, {"session_id": "s", "semantic_var_id": "w", "value": MARK}, ()),
    "wrong value": (VARIABLES, {"session_id": "s", "semantic_var_id": "w2", "value": {MARK: 1}}, ()),
    "wrong name": (VARIABLES, {"session_id": "s", "semantic_var_id": f"{MARK} {MARK}", "value": MARK}, ()),
    "program": (PROGRAMS, {"values": {"i": MARK}, "calls": [submitted(MARK)], "gets": {"out": None}}, ()),
    "wrong program": (PROGRAMS, {"values": {"i": MARK}, "calls": [submitted(MARK, tools=MARK)], MARK: MARK}, ()),
    "wrong call of a program": (PROGRAMS, {"calls": [submitted(MARK, transforms=MARK)]}, ()),
    "submitted prompt": (SUBMIT, {**submitted(MARK), "session_id": "s2"}, ()),
    "wrong submitted prompt": (SUBMIT, {**submitted(MARK, placeholders=MARK), "session_id": "s2"}, ()),
    "no JSON": (CHAT, {"": MARK}, ("content-encoding: gzip",)),
    "another key": (CHAT, {}, (f"x-api-key: {MARK}", f"api-key: {MARK}")),
}  # fmt: skip

SAID: Final = {"message": f"I say {MARK}", "type": MARK, "code": MARK, "param": MARK}
ANSWERS: Final[dict[str, EngineAnswer]] = {
    "an answer": (200, ANSWER),
    "its text in an answer": (200, json.loads(json.dumps(ANSWER).replace("the words of a prompt", MARK))),
    "a refusal": (422, {"error": SAID}),
    "a failure": (500, {"error": SAID}),
    "another form of refusal": (400, {"detail": [{"loc": ["body", MARK], "msg": MARK, "input": MARK}]}),
    "garbage": (200, MARK.encode()),
    "an error in a stream": (200, b"data: %b\n\n" % json.dumps({"error": {**SAID, "code": 500}}).encode()),
}


class Watched:
    """A gateway, and all that it tells: its log, and the events of its live page."""

    def __init__(self, served: Served, logs: list[Any]) -> None:
        self.served = served
        self.logs = logs
        self.live = b""

    async def watch(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.served.port)
        try:
            writer.write(request(b"", method="GET", path="/admin/live", key="admin"))
            while piece := await reader.read(65_536):
                self.live += piece
        finally:
            writer.close()

    async def leaks(self, reply: Reply) -> list[str]:
        """Where the marker is, beside the answer itself and what operators read of it."""
        told = reply.headers.get("plait-receipt", "")
        told += "".join(line for line in reply.body.decode().splitlines() if line.startswith(":"))
        await asyncio.sleep(0.02)  # calls of programs may end later
        receipts = list(self.served.gateway.house[Receipts].newest())
        found = {
            "log": repr(self.logs),
            "metrics": exposed_text(self.served.gateway.kernel.registry),
            "answer's receipt": told,
            "receipt": repr([shown(receipt) for receipt in receipts]),
            "operators' receipt": repr([shown(receipt, str) for receipt in receipts]),
            "sentences on the live page": repr([list(sentences(shown(receipt, str))) for receipt in receipts]),
            "spans": repr([
                (span.name, span.attributes)
                for receipt in receipts
                for span in spans_of(EndedCall(receipt, 1, 2, 3, "tenant", "", {}), Resource.create({}))
            ]),
        }  # fmt: skip
        self.logs.clear()
        return [place for place, text in found.items() if MARK in text]


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    with capture_logs() as logs:
        async with fleet("a", "b") as served:
            seen = Watched(served, logs)
            watching = asyncio.create_task(seen.watch())
            await asyncio.sleep(0.05)
            given = json.dumps({"session_id": "s", "semantic_var_id": "v", "value": MARK}).encode()
            assert b" 200 " in await served.send(request(given, path=VARIABLES))
            yield seen
            async with asyncio.timeout(WITHIN_S):
                while b"event: calls" not in seen.live:  # noqa: ASYNC110 - it grows as the gateway tells
                    await asyncio.sleep(TOLD_AFTER_S)
            await asyncio.sleep(TOLD_AFTER_S)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            assert MARK.encode() not in seen.live


async def send(seen: Watched, name: str, *headers: str, **fields: Any) -> Reply:
    path, given, more = CASES[name]
    for engine in seen.served.gateway.kernel.router.engines:  # those of a failure before
        seen.served.gateway.kernel.router.health.answered(engine, {"m": None})
    usual: dict[str, Any] = {} if path in {PROGRAMS, SUBMIT, VARIABLES} else {"model": "m"}
    usual |= {"messages": TEXT} if path == CHAT else {}
    body = json.dumps({**usual, **given, **fields}).encode()
    return Reply.of(await seen.served.send(request(body, *more, *headers, path=path)))


@pytest.mark.parametrize("engine", ANSWERS)
async def test_no_text_of_a_request_is_told(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    kinds = CASES if engine in {"an answer", "a refusal"} else ["message of user", "texts to embed"]
    found, statuses = {}, set()
    async with watched() as seen:
        seen.served.answer = ANSWERS[engine]
        for name in kinds:
            takes_receipts = CASES[name][0] not in {PROGRAMS, SUBMIT, VARIABLES}
            reply = await send(seen, name, *(["plait-receipt: true"] if takes_receipts else []))
            statuses.add(reply.status)
            allowed = (
                {"operators' receipt"} if engine not in {"an answer", "its text in an answer", "garbage"} else set()
            )
            leaks = set(await seen.leaks(reply)) - allowed
            if leaks or MARK in caplog.text:
                found[name] = leaks
    assert not found
    assert len(statuses) > 3 or kinds is not CASES


async def test_no_text_of_a_stream_is_told() -> None:
    event = json.dumps({"choices": [{"index": 0, "delta": {"content": MARK}, "finish_reason": "stop"}]})
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}})
    async with watched() as seen:
        for stream in (
            f"data: {event}\n\ndata: {usage}\n\ndata: [DONE]\n\n",
            f"data: {event}\n\n",
            f"data: {MARK}\n\n",
        ):
            seen.served.answer = (200, stream.encode())
            reply = await send(seen, "message of user", "plait-receipt: true", stream=True)
            assert await seen.leaks(reply) == [], stream


async def test_operators_read_what_an_engine_says() -> None:
    async with watched() as seen:
        for engine in ("a refusal", "a failure"):
            seen.served.answer = ANSWERS[engine]
            assert await seen.leaks(await send(seen, "message of user")) == ["operators' receipt"]


async def test_no_key_is_told() -> None:
    async with watched() as seen:
        await seen.served.send(request())
        await seen.served.send(request(key=MARK))
        refused = (await get(seen.served, "/admin/receipts?code=invalid_api_key")).body
        assert MARK not in repr(seen.logs)
    assert b"invalid_api_key" in refused
    assert MARK.encode() not in refused


async def test_names_are_told() -> None:
    """What is no text, so that the marker is in none of them above."""
    async with watched() as seen:
        await send(seen, "output", "x-request-id: an-id")
        async with asyncio.timeout(WITHIN_S):
            while not (lines := [line for line in seen.logs if line["event"] == "call"]):  # noqa: ASYNC110 - soon
                await asyncio.sleep(0.01)
    (line,) = lines
    assert (line["session"], line["output"], line["model"]) == ("s", "out", "m")


async def test_names_of_agents_are_in_receipts_and_on_the_live_page() -> None:
    async with fleet("a") as served:
        seen = Watched(served, [])
        watching = asyncio.create_task(seen.watch())
        await asyncio.sleep(0.05)
        with capture_logs() as seen.logs:
            data = request(None, f"session-id: {MARK}", "thread-id: child", "plait-receipt: true")
            found = await seen.leaks(Reply.of(await served.send(data)))
        (receipt,) = served.gateway.house[Receipts].newest()
        await asyncio.sleep(TOLD_AFTER_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert set(found) == {"answer's receipt", "receipt", "operators' receipt", "sentences on the live page"}
    assert (shown(receipt)["agent"], shown(receipt)["parent_agent"]) == (f"{MARK}/child", MARK)
    assert f'"agent":"{MARK}/child","parent_agent":"{MARK}"'.encode() in seen.live
