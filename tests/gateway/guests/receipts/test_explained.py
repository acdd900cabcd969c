"""`POST /admin/explain`: the placement that a call would get now. All engines are compared, and nothing changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.gateway.guests.receipts.receipts import Receipts
from tests.gateway.api.served_gateway import CHAT, SECRET, Reply, Served, request
from tests.gateway.exposed import samples
from tests.gateway.guests.receipts.asked_gateway import PREFIX, answer, fleet, reply, said

BODY: dict[str, Any] = {"model": "m", **said(PREFIX)}
ENGINES = ("a", "b", "c", "d", "e", "f")


async def ask(made: Served, *, key: str = "admin", query: str = "", **fields: Any) -> Reply:
    data = request(json.dumps({"body": BODY, **fields}).encode(), path=f"/admin/explain{query}", key=key)
    return await reply(made, data)


def state(made: Served) -> tuple[object, ...]:
    """What a call changes, or a request that counts. Its prompt is tokenized in any case."""
    gateway = made.gateway
    router, admission = gateway.kernel.router, gateway.kernel.admission
    counted = {
        name: value
        for name, value in samples(gateway.kernel.registry).items()
        if not name.startswith(("process_", "python_", "plait_event_loop", "plait_tokenizer_"))
    }
    return (
        [engine.view.outstanding for engine in router.engines.values()],
        [engine.view.residency.resident.blocks for engine in router.engines.values()],
        repr(list(router.tree.root.children.values())),
        len(router.answers.answered.prompts),
        {name: backlog.length for name, backlog in admission.queue.backlogs.items()},
        len(list(gateway.house[Receipts].newest())),
        counted,
    )


async def test_all_engines_are_compared_and_nothing_changes() -> None:
    async with fleet(*ENGINES) as made:
        made.answer = (200, answer(0))
        for _ in range(2):
            await made.send(request(BODY))
        before = state(made)
        found = (await ask(made)).json
        assert state(made) == before
        asked_engines = made.gateway.kernel.router.engines
    (attempt,) = found["attempts"]
    costs = [one["cost_s"] for one in attempt["candidates"]]
    assert (found["outcome"], found["status"], found["path"], found["tenant"]) == ("explained", 200, CHAT, "")
    assert {one["engine"] for one in attempt["candidates"]} == set(asked_engines)
    assert attempt["engine"] == attempt["candidates"][0]["engine"]
    assert costs[0] == min(costs)
    assert attempt["predicted_cached_tokens"] > 0
    assert attempt["sent_s"] is None
    assert attempt["margin_s"] == pytest.approx(sorted(costs)[1] - costs[0], abs=2e-6)


async def test_a_turn_that_continues_an_answer_changes_nothing() -> None:
    """A client's own next turn would tell the router that the engine has the answer, too."""
    async with fleet() as made:
        counted = (await reply(made, request(b"", method="GET", path="/v1/models"))).status
        assert counted == 200
        explained = (await ask(made)).json
        usage = {"prompt_tokens": explained["prompt_tokens"], "completion_tokens": 200}
        text = "an answer of some length " * 40
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        made.answer = (200, {**answer(0), "choices": [choice], "usage": usage})
        await made.send(request(BODY))
        turns = [*BODY["messages"], {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        before = state(made)
        assert len(made.gateway.kernel.router.answers.answered.prompts) == 1
        assert (await ask(made, body={"model": "m", "messages": turns})).status == 200
        assert state(made) == before
        await made.send(request({"messages": turns}))
        assert state(made)[2] != before[2]


@pytest.mark.parametrize("by_query", [True, False])
async def test_what_would_be_without_an_engine(*, by_query: bool) -> None:
    async with fleet("a", "b", "c") as made:
        first = (await ask(made)).json["attempts"][0]
        given: dict[str, Any] = {"query": f"?without={first['engine']}"} if by_query else {"without": first["engine"]}
        second = (await ask(made, **given)).json["attempts"][0]
    assert first["engine"] not in {one["engine"] for one in second["candidates"]}
    assert (first["engines"], second["engines"]) == (3, 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": PREFIX}),
        ("/v1/messages", {**BODY, "max_tokens": 5}),
        ("/v1/responses", {"model": "m", "input": PREFIX}),
        ("/v1/responses/input_tokens", {"model": "m", "input": PREFIX}),
        ("/v1/messages/count_tokens", {**BODY, "max_tokens": 5}),
        ("/v1/embeddings", {"model": "m", "input": PREFIX}),
    ],
)
async def test_a_call_of_each_api(path: str, body: dict[str, Any]) -> None:
    async with fleet("a", "b") as made:
        found = (await ask(made, path=path, body=body, headers={"x-slo-ttft-ms": "500"})).json
    assert found["prompt_tokens"] > 0
    assert len(found["attempts"][0]["candidates"]) == 2


async def test_objectives_are_those_of_the_headers() -> None:
    async with fleet("a", "b") as made:
        found = (await ask(made, headers={"X-SLO-TTFT-ms": "500"})).json
    assert found["attempts"][0]["meets_slo"] is True


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"path": "/v1/nothing"}, (400, "path")),
        ({"without": "z"}, (404, "without")),
        ({"body": {"model": "m", "messages": SECRET}}, (400, "messages")),
        ({"body": {"model": "z", "messages": []}}, (404, "model")),
        ({"path": "/v1/messages"}, (400, "max_tokens")),
        ({"headers": {"x-slo-ttft-ms": "soon"}}, (400, "x-slo-ttft-ms")),
        ({"body": SECRET}, (400, "body")),
        ({"boby": {}}, (400, "boby")),
        ({"key": "one"}, (401, None)),
        ({"body": {**BODY, "plait": {"priority": []}}}, (400, "plait.priority")),
    ],
)
async def test_a_wrong_question(fields: dict[str, Any], expected: tuple[int, str | None]) -> None:
    async with fleet() as made:
        refused = await ask(made, **fields)
        whole = await reply(made, request(b"[]", path="/admin/explain", key="admin"))
    error = refused.json["error"]
    assert (refused.status, error["param"]) == expected, error
    assert whole.status == 400


async def test_no_engine_is_left() -> None:
    async with fleet() as made:
        refused = await ask(made, without="a")
    assert (refused.status, refused.json["error"]["code"]) == (503, "no_engine_available")
