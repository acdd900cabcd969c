"""What the receipt of a request says, of a gateway with scripted engines, for each way in which requests end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from plait.gateway.guests.receipts.receipts import Receipts
from plait.gateway.guests.receipts.told import MOST_BYTES
from plait.gateway.guests.receipts.words import sentences
from tests.gateway.api.served_gateway import CHAT, SECRET, Served, request
from tests.gateway.guests.receipts.asked_gateway import PREFIX, answer, fleet, get, receipt, receipt_of, reply, said
from tests.waiting import WITHIN_S

TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
USAGE: Final = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def streamed(*, with_end: bool = True) -> bytes:
    """A stream of an answer."""
    chunk = {"id": "c", "object": "chat.completion.chunk", "model": "m"}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": USAGE},
    ]
    events = [b"data: %b\n\n" % json.dumps({**chunk, **fields}).encode() for fields in chunks]
    return b"".join([*events, *([b"data: [DONE]\n\n"] if with_end else [])])


async def test_an_answered_call() -> None:
    async with fleet("a", "b", "c") as made:
        made.answer = (200, answer(3))
        await made.send(request(said(PREFIX)))
        found = await receipt_of(made, request(said(PREFIX), f"traceparent: 00-{TRACE}-00f067aa0ba902b7-01"))
    (attempt,) = found["attempts"]
    chosen, *others = attempt["candidates"]
    assert (found["status"], found["outcome"], found["code"], found["message"]) == (200, "ok", None, None)
    assert (found["path"], found["model"], found["trace_id"]) == (CHAT, "m", TRACE)
    assert (found["cached_tokens"], found["output_tokens"], found["finish_reason"]) == (3, 1, "stop")
    assert found["prompt_tokens"] > attempt["predicted_cached_tokens"] > 0, "of the call before it"
    assert (attempt["rule"], attempt["engines"], attempt["failed"]) == ("least_delay", 3, None)
    assert chosen["engine"] == attempt["engine"]
    assert {chosen["engine"], *(one["engine"] for one in others)} == {"a", "b", "c"}
    for one in attempt["candidates"]:
        weighed = sum(part["s"] * part["weight"] for part in one["parts"].values())
        assert weighed == pytest.approx(one["cost_s"], abs=1e-5)
    assert attempt["margin_s"] == pytest.approx(min(one["cost_s"] for one in others) - attempt["cost_s"], abs=2e-6)
    assert 0 <= attempt["placed_s"] <= attempt["sent_s"] <= found["e2e_s"]
    assert (found["waits"], found["moves"], found["refusal"]) == ([], [], None)


async def test_operators_get_the_sentences_too() -> None:
    async with fleet("a", "b") as made:
        made.answer = (200, answer(3))
        found = await receipt_of(made, request(said(PREFIX)))
        own = await receipt(made, found["request_id"], "one")
    assert found["sentences"] == list(sentences(found))
    assert any("tokens were cached (0 expected)" in sentence for sentence in found["sentences"])
    assert "sentences" not in own


async def test_a_tenant_sees_its_own_only() -> None:
    async with fleet("a", "b") as made:
        request_id = (await reply(made, request(said(PREFIX)))).headers["x-request-id"]
        await asyncio.sleep(0.02)
        own = await receipt(made, request_id, "one")
        others = [await get(made, f"/v1/receipts/{request_id}", key) for key in ("two", "admin", "wrong")]
        not_admin = await get(made, f"/admin/receipts/{request_id}", "one")
    assert "tenant" not in own
    assert "message" not in own
    assert ["parts" in one for one in own["attempts"][0]["candidates"]] == [True, False]
    assert [(one.status, one.json["error"]["code"]) for one in others] == [
        (404, "receipt_not_found"),
        (401, "invalid_api_key"),
        (401, "invalid_api_key"),
    ]
    assert not_admin.status == 401


async def test_a_call_that_its_engine_refuses() -> None:
    async with fleet() as made:
        made.answer = (422, {"error": {"message": f"I do not like {SECRET}{'!' * 400}", "type": "x"}})
        found = await receipt_of(made, request())
        own = await receipt(made, found["request_id"], "one")
    assert (found["status"], found["outcome"], found["code"]) == (422, "refused", None)
    assert found["message"].startswith(f"refused with status 422: I do not like {SECRET}")
    assert len(found["message"]) == 200
    assert [one["engine"] for one in found["attempts"]] == ["a"]
    assert SECRET not in json.dumps(own)


async def test_a_call_that_a_second_engine_answers() -> None:
    async with fleet("a", "b") as made:
        first = (await receipt_of(made, request()))["attempts"][0]["engine"]
        made.answers["b" if first == "a" else "a"] = (500, {"error": {"message": f"I fail at {SECRET}"}})
        for number in range(20):
            found = await receipt_of(made, request(said(f"{number} {PREFIX}")))
            if len(found["attempts"]) == 2:
                break
    failed, last = found["attempts"]
    assert (found["status"], found["outcome"], found["message"]) == (200, "ok", None)
    assert (failed["failed"], last["failed"], last["rule"]) == ("status_500", None, "after_failure")
    assert failed["rule"] == "least_delay"
    assert {failed["engine"], last["engine"]} == {"a", "b"}


async def test_a_call_that_all_engines_fail() -> None:
    async with fleet("a", "b") as made:
        made.answer = (503, {"error": {"message": f"I fail at {SECRET}"}})
        found = await receipt_of(made, request())
        own = await receipt(made, found["request_id"], "one")
    assert (found["status"], found["outcome"], found["code"]) == (503, "no_engine", "engine_error")
    assert [one["failed"] for one in found["attempts"]] == ["status_503", "status_503"]
    assert SECRET not in json.dumps(own)


async def refused_at_once(made: Served, data: bytes) -> dict[str, Any]:
    await made.send(data)
    return await receipt_of(made, data)


async def refused_behind_one(made: Served, data: bytes) -> dict[str, Any]:
    return await _refused_behind(made, data, 1)


async def refused_behind_two(made: Served, data: bytes) -> dict[str, Any]:
    return await _refused_behind(made, data, 2)


async def _refused_behind(made: Served, data: bytes, count: int) -> dict[str, Any]:
    """While the engine says nothing, and so many calls are under way."""
    made.answer = None
    before = [asyncio.create_task(made.send(data)) for _ in range(count)]
    one = len(data.partition(b"\r\n\r\n")[2])
    async with asyncio.timeout(WITHIN_S):
        bodies = made.gateway.kernel.bodies
        while sum(bodies._bytes.values()) < one * sum(not task.done() for task in before):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    found = await receipt_of(made, data)
    for task in before:
        task.cancel()
    await asyncio.gather(*before, return_exceptions=True)
    return found


LONG = request(said("x" * 2000))
Sections = dict[str, dict[str, Any]]
LIMITS: Final[dict[str, tuple[Sections, Callable[[Served, bytes], Awaitable[dict[str, Any]]], tuple[Any, ...]]]] = {
    "calls_per_second": ({"admission": {"calls_per_s": 0.1}}, refused_at_once, ("calls_per_s", 0.1)),
    "tokens_per_second": ({"admission": {"tokens_per_s": 10}}, refused_at_once, ("tokens_per_s", 10)),
    "too_many_waiting": (
        {"admission": {"max_running": 1, "max_waiting": 1}},
        refused_behind_two,
        ("max_waiting", 1),
    ),
    "overloaded": ({"admission": {"max_running": 1, "max_wait_s": 0.001}}, refused_behind_two, ("max_wait_s", 0.001)),
    "waiting": ({"admission": {"max_running": 1, "hold_s": 0.05}}, refused_behind_one, (None, None)),
    "too_many_open_bytes": (
        {"server": {"max_body_bytes": 3000, "max_open_body_bytes": 3000}},
        refused_behind_one,
        ("max_open_body_bytes", 3000),
    ),
}


@pytest.mark.parametrize("code", LIMITS)
async def test_a_limit_that_is_reached(code: str) -> None:
    sections, make, expected = LIMITS[code]
    async with fleet(**sections) as made:
        found = await make(made, LONG)
    refusal = found["refusal"]
    assert (found["status"], found["code"], found["outcome"]) == (429, code, "refused")
    assert (refusal["limit"], refusal["most"]) == expected
    assert refusal["limit"] is None or refusal["used"] > 0
    assert refusal["retry_after_s"] >= 1.0
    assert found["waits"] == [] or code in {"waiting", "overloaded"}
    assert all(one["sent_s"] is None for one in found["attempts"])


async def test_a_call_that_waits_for_an_engine_and_is_never_sent() -> None:
    """The last call waits for its turn, and for its engine's prompts once those before it have waited for too long.

    On a busy machine, its own wait may be over in the same iteration of the loop as theirs: then it is tried again.
    """
    async with fleet("a", "b", admission={"ahead_s": 1e-6, "hold_s": 0.05}) as made:
        for _ in range(10):
            found = await _refused_behind(made, LONG, 6)
            (attempt,), why = found["attempts"], {wait["why"] for wait in found["waits"]}
            assert found["code"] == "waiting"
            assert why <= {"turn", "prompts"}
            assert (attempt["rule"], attempt["sent_s"], attempt["failed"]) == ("least_delay", None, None)
            if "prompts" in why:
                return
    pytest.fail("it has never been the first in line")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (request(b"{"), (400, "invalid_json", "")),
        (request({"messages": SECRET}), (400, "invalid_request_error", "m")),
        (request({"model": SECRET}), (404, "model_not_found", "")),
        (request(b"", length=10**6), (413, "body_too_large", "")),
        (request(key="wrong"), (401, "invalid_api_key", "")),
    ],
)
async def test_a_request_that_is_no_call(data: bytes, expected: tuple[int, str, str]) -> None:
    async with fleet() as made:
        found = await receipt_of(made, data)
        own = await get(made, f"/v1/receipts/{found['request_id']}", "one")
    assert (found["status"], found["code"], found["model"]) == expected
    assert (found["outcome"], found["attempts"], found["waits"]) == ("refused", [], [])
    assert own.status == (404 if expected[0] == 401 else 200)
    assert SECRET not in json.dumps(found)
    assert SECRET.encode() not in own.body


async def test_a_client_that_goes() -> None:
    async with fleet() as made:
        made.answer = None
        await made.send(request(said(PREFIX)), answered=False)
        await asyncio.sleep(0.1)
        (found,) = (await get(made, "/admin/receipts")).json["data"]
    assert (found["status"], found["outcome"], found["code"]) == (499, "client_gone", None)
    assert [one["engine"] for one in found["attempts"]] == ["a"]
    assert found["attempts"][0]["sent_s"] is not None


async def test_a_translated_request() -> None:
    async with fleet() as made:
        made.answer = (200, answer(0))
        sent = request({"max_tokens": 5}, "plait-receipt: true", path="/v1/messages")
        answered = await reply(made, sent)
        await asyncio.sleep(0.02)
        found = await receipt(made, answered.headers["x-request-id"])
    assert (found["status"], found["path"], found["output_tokens"]) == (200, CHAT, 1)
    assert json.loads(answered.headers["plait-receipt"])["request_id"] == found["request_id"]


async def test_a_chained_call() -> None:
    async with fleet() as made:
        await made.send(request({"messages": 3}, "plait-session: s", "plait-output: x"))
        await made.send(request(None, "plait-session: s", "plait-inputs: x"))
        await made.send(request(None, "plait-session: s", "plait-output: y"))
        await asyncio.sleep(0.02)
        found = (await get(made, "/admin/receipts")).json["data"]
    assert [(one["status"], one["code"]) for one in found] == [
        (200, None),
        (424, "input_failed"),
        (400, "invalid_request_error"),
    ]


async def test_the_calls_of_a_program_name_those_that_made_their_inputs() -> None:
    programs = {"s": {"x": "Hi", "y": "{{x}}", "z": "{{x}} {{y}}"}, "other": {"x": "Hi"}}
    async with fleet() as made:
        for session, steps in programs.items():
            for output, text in steps.items():
                headers = f"plait-session: {session}", f"plait-output: {output}", f"x-request-id: {output}"
                given = [f"plait-inputs: {', '.join(re.findall('[xy]', text))}"] if "{{" in text else []
                await made.send(request(said(text), *headers, *given))
        await asyncio.sleep(0.02)
        whole = (await get(made, "/admin/receipts")).json["data"]
        (program,) = {one["program"] for one in whole if one["request_id"] == "z"}
        found = (await get(made, f"/admin/receipts?program={program}")).json["data"]
    assert {one["request_id"]: one["made_by"] for one in found} == {"z": ["x", "y"], "y": ["x"], "x": None}
    assert len({one["program"] for one in whole}) == len(programs)


async def test_a_maker_is_the_step_that_made_the_input() -> None:
    """A call with several outputs takes a step for each."""

    def call(prompt: str, made: str, *inputs: str) -> dict[str, Any]:
        places = [{"name": name, "in_out": name in made, "semantic_var_id": name} for name in (*inputs, *made)]
        return {"model": "m", "prompt": prompt, "max_tokens": 4, "placeholders": places}

    program = {"session": "s", "calls": [call("{{a}} {{b}}", "ab"), call("{{b}} {{c}}", "c", "b")], "gets": {"c": None}}
    async with fleet() as made:
        answered = await reply(made, request(json.dumps(program).encode(), "x-request-id: P", path="/v1/programs"))
        assert answered.status == 200, answered
        await asyncio.sleep(0.02)
        found = (await get(made, "/admin/receipts")).json["data"]
    makers = {one["request_id"]: one["made_by"] for one in found if one["path"] != "/v1/programs"}
    assert makers == {"P:0": None, "P:0.1": None, "P:1": ["P:0.1"]}


async def test_no_receipts() -> None:
    async with fleet(receipts={"max_bytes": 0}) as made:
        answered = await reply(made, request())
        assert answered.status == 200
        assert len(list(made.gateway.house[Receipts].newest())) == 0
        request_id = answered.headers["x-request-id"]
        statuses = [
            (await get(made, f"/v1/receipts/{request_id}", "one")).status,
            (await get(made, f"/admin/receipts/{request_id}")).status,
        ]
        listed = await get(made, "/admin/receipts")
    assert statuses == [404, 404]
    assert listed.json["data"] == []


async def test_a_client_gets_the_receipt_with_its_answer() -> None:
    async with fleet("a", "b", "c") as made:
        plain = await reply(made, request())
        whole = await reply(made, request(None, "plait-receipt: true"))
        by_body = await reply(made, request({"plait": {"receipt": True}}))
        made.answer = (200, streamed())
        stream = await reply(made, request({"stream": True}, "plait-receipt: true"))
    assert "plait-receipt" not in plain.headers
    for told in (whole, by_body):
        assert len(told.headers["plait-receipt"]) <= MOST_BYTES
        fields = json.loads(told.headers["plait-receipt"])
        assert (fields["request_id"], fields["output_tokens"]) == (told.headers["x-request-id"], 1)
        assert len(fields["attempts"][0]["candidates"]) == 3
    begun = json.loads(stream.headers["plait-receipt"])
    assert (begun["outcome"], begun["attempts"][0]["engine"]) == ("running", stream.headers["plait-engine"])
    *events, comment, last = stream.body.decode().rstrip("\n").split("\n\n")
    assert last == "data: [DONE]"
    assert not any(event.startswith(":") for event in events)
    assert comment.startswith(": plait-receipt ")
    ended = json.loads(comment.removeprefix(": plait-receipt "))
    assert (ended["outcome"], ended["output_tokens"], ended["finish_reason"]) == ("ok", 2, "stop")
    assert ended["first_token_s"] > 0
    assert SECRET not in comment


async def test_the_newest_and_the_worst() -> None:
    tenants = [{"name": "blue", "api_keys": ["blue"]}]
    async with fleet("a", "b", tenants=tenants, admission={"max_running": 1}) as made:
        for number in range(3):
            await made.send(request(said(f"{number} {PREFIX}")))
        await made.send(request({"messages": 3}, key="blue"))
        await asyncio.gather(*(made.send(request(said(f"blue {number}"), key="blue")) for number in range(3)))
        await asyncio.sleep(0.02)

        async def found(query: str) -> list[dict[str, Any]]:
            listed: list[dict[str, Any]] = (await get(made, f"/admin/receipts?{query}")).json["data"]
            return listed

        times = [one["at"] for one in await found("")]
        assert (len(times), times) == (7, sorted(times, reverse=True))
        assert [one["tenant"] for one in await found("tenant=blue")] == ["blue"] * 4
        assert [one["code"] for one in await found("code=invalid_request_error")] == ["invalid_request_error"]
        on_a, on_b = await found("engine=a"), await found("engine=b")
        assert {one["attempts"][0]["engine"] for one in on_a} == {"a"}
        assert len(on_a) + len(on_b) == 6
        waited = [sum(wait["for_s"] for wait in one["waits"]) for one in await found("worst=wait")]
        assert waited == sorted(waited, reverse=True)
        assert waited[0] > 0
        assert len(await found("limit=2")) == 2
        assert len(await found("tenant=nobody")) == len(await found("engine=z")) == 0
        assert len(await found("worst=late")) == 7


@pytest.mark.parametrize(
    ("query", "param"),
    [("worst=best", "worst"), ("limit=0", "limit"), ("limit=201", "limit"), ("limit=x", "limit"), ("engines=a", None)],
)
async def test_a_wrong_question(query: str, param: str | None) -> None:
    async with fleet() as made:
        refused = await get(made, f"/admin/receipts?{query}")
        unknown = await get(made, "/admin/receipts/unknown")
        keyless = await get(made, "/admin/receipts", "one")
    assert (refused.status, refused.json["error"]["param"]) == (400, param)
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "receipt_not_found")
    assert keyless.status == 401
