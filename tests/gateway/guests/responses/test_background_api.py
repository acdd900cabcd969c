"""Responses in the background: made whether their client waits or not, followed, cancelled, and kept."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from plait.backends.protocol.api_errors import write_event
from plait.backends.translation.background_turn import replayed
from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.timer import loop_time_s
from tests.gateway.guests.programs.chained_gateway import Exchange, Served, served_calls, settle
from tests.waiting import WITHIN_S

RESPONSES = "/v1/responses"
TEXT = "a text that is longer than a piece"


async def begin(served: Served, text: str = "hi", **fields: Any) -> Exchange:
    return await served.send(RESPONSES, {"model": "m", "input": text, "background": True, **fields})


async def begun(served: Served, text: str = "hi", **fields: Any) -> str:
    """The id of a new response."""
    exchange = await begin(served, text, **fields)
    assert exchange.status == 200, exchange.body
    return str(exchange.json["id"])


async def retrieve(served: Served, response_id: str, rest: str = "", **more: str) -> Exchange:
    return await served.send(f"{RESPONSES}/{response_id}{rest}", method="GET", **more)


async def status_of(served: Served, response_id: str) -> str:
    return str((await retrieve(served, response_id)).json["status"])


def events(exchange: Exchange) -> list[Any]:
    return read(exchange.body)


def read(stream: bytes) -> list[Any]:
    return [json.loads(line.removeprefix(b"data: ")) for line in stream.split(b"\n") if line.startswith(b"data: ")]


def numbers(exchange: Exchange) -> list[int]:
    return [event["sequence_number"] for event in events(exchange)]


def text_of(exchange: Exchange) -> str:
    return "".join(event["delta"] for event in events(exchange) if event["type"] == "response.output_text.delta")


async def test_a_response_is_queued_in_progress_and_completed() -> None:
    async with served_calls() as served:
        exchange = await begin(served, metadata={"a": "b"})
        queued = exchange.json
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        assert queued["metadata"] == {"a": "b"}
        response_id = queued["id"]
        assert await status_of(served, response_id) == "queued"
        await served.engine.begin("hi", TEXT[:2])
        assert await status_of(served, response_id) == "in_progress"
        assert (await retrieve(served, response_id, "/input_items")).json["data"][0]["content"] == "hi"
        await served.engine.answer("hi", TEXT[2:])
        completed = (await retrieve(served, response_id)).json
        assert (completed["status"], completed["id"]) == ("completed", response_id)
        assert completed["output"][0]["content"][0]["text"] == TEXT
        assert (await retrieve(served, response_id, "/input_items")).json["data"][0]["content"] == "hi"
        assert len(served.executor.sessions) == 0, "it is a stored response now"


async def test_another_tenant_does_not_see_it() -> None:
    async with served_calls() as served:
        response_id = await begun(served)
        assert (await retrieve(served, response_id, key="two")).status == 404
        cancelled = await served.send(f"{RESPONSES}/{response_id}/cancel", key="two")
        assert cancelled.status == 404
        assert await status_of(served, response_id) == "queued"


async def test_it_is_continued_and_deleted_as_any_other() -> None:
    async with served_calls() as served:
        first = await begun(served)
        unknown = await begin(served, "and?", previous_response_id=first)
        assert unknown.status == 400, "it has not ended"
        await served.engine.answer("hi", "hello")
        second = await begun(served, "and?", previous_response_id=first)
        await served.engine.answer("hi|hello|and?", "that")
        assert (await retrieve(served, second)).json["previous_response_id"] == first
        deleted = await served.send(f"{RESPONSES}/{second}", method="DELETE")
        assert deleted.json["deleted"] is True
        assert (await retrieve(served, second)).status == 404


async def test_one_that_runs_is_deleted_with_its_call() -> None:
    async with served_calls() as served:
        response_id = await begun(served)
        reader = await retrieve(served, response_id, "?stream=true")
        deleted = await served.send(f"{RESPONSES}/{response_id}", method="DELETE")
        await settle()
        assert (deleted.status, served.engine.running) == (200, {})
        assert events(reader)[-1]["type"] == "error"
        assert (await retrieve(served, response_id)).status == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"store": False}, "store"), ({"input": 5}, "input"), ({"prompt": {"id": "p"}}, "prompt")],
)
async def test_what_cannot_be_is_refused(fields: dict[str, Any], param: str) -> None:
    async with served_calls() as served:
        refused = await begin(served, **fields)
        assert (refused.status, refused.json["error"]["param"]) == (400, param)
        named = await served.send(
            RESPONSES, {"model": "m", "input": "hi", "background": True}, plait_session="s", plait_output="v"
        )
        assert (named.status, named.json["error"]["param"]) == (400, "background")
        unknown = await begin(served, model="unknown")
        assert unknown.status == 404


@pytest.mark.parametrize("given", ["no", "", 0, 1, [], {}])
@pytest.mark.parametrize("name", ["background", "store"])
async def test_background_and_store_are_booleans(name: str, given: object) -> None:
    async with served_calls() as served:
        refused = await served.send(RESPONSES, {"model": "m", "input": "hi", name: given})
        assert (refused.status, refused.json["error"]["param"]) == (400, name)


@pytest.mark.parametrize(("most", "status"), [(0, 400), (1_000, 400), (1_200, 200)])
async def test_what_could_not_be_stored_is_not_begun(most: int, status: int) -> None:
    async with served_calls(max_response_bytes=most) as served:
        asked = await begin(served)
        assert asked.status == status
        if status == 400:
            assert asked.json["error"]["param"] == "background"
            return
        await served.engine.answer("hi", TEXT)
        assert (await retrieve(served, asked.json["id"])).json["status"] == "completed"


async def test_one_that_is_too_large_to_be_stored_has_failed() -> None:
    async with served_calls(max_response_bytes=1_500) as served:
        response_id = await begun(served, instructions="be brief" * 10)
        reader = await retrieve(served, response_id, "?stream=true")
        with capture_logs() as logs:
            await served.engine.answer("be brief" * 10 + "|hi", "x" * 1_000)
        await asyncio.wait_for(reader.task, WITHIN_S)
        failed = (await retrieve(served, response_id)).json
        assert (failed["status"], failed["output"]) == ("failed", [])
        assert failed["error"]["message"] == "The response is larger than this gateway stores. Ask for less."
        assert events(reader)[-1]["error"]["code"] == "answer_too_large"
        assert [line["session"] for line in logs if "too large" in line["event"]] == [response_id]


async def test_it_names_the_model_and_not_its_alias() -> None:
    async with served_calls(more={"models": [{"name": "m", "tokenizer": "embedded", "aliases": ["other"]}]}) as served:
        queued = await begin(served, model="other")
        assert queued.json["model"] == "m", "as the engine's answer in the foreground"
        await served.engine.answer("hi", TEXT)
        assert (await retrieve(served, queued.json["id"])).json["model"] == "m"


async def test_what_an_engine_refuses_has_failed() -> None:
    async with served_calls() as served:
        response_id = await begun(served)
        await served.engine.refuse("hi")
        failed = (await retrieve(served, response_id)).json
        assert failed["status"] == "failed"
        assert failed["error"]["message"] == "too long"


async def test_engines_that_fail_fail_the_response() -> None:
    async with served_calls() as served:
        response_id = await begun(served)
        await served.engine.break_off("hi", TEXT)
        failed = (await retrieve(served, response_id)).json
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert "stream lost" in failed["error"]["message"]


async def test_a_cancelled_response_frees_its_engine_and_stays_cancelled() -> None:
    async with served_calls() as served:
        response_id = await begun(served)
        await served.engine.begin("hi", TEXT)
        cancelled = await served.send(f"{RESPONSES}/{response_id}/cancel")
        await settle()
        assert (cancelled.status, cancelled.json["status"], served.engine.running) == (200, "cancelled", {})
        assert await status_of(served, response_id) == "cancelled"
        again = await served.send(f"{RESPONSES}/{response_id}/cancel")
        assert (again.status, again.json) == (200, cancelled.json)


async def test_only_a_response_in_the_background_is_cancelled_or_streamed_again() -> None:
    async with served_calls() as served:
        response_id, stored = await begun(served), served.gateway.house[StoredResponses]
        await served.engine.answer("hi", TEXT)
        (tenant,), plain = stored._tenants, b'{"id":"resp_1","status":"completed","background":false,"output":[]}'
        stored.put(tenant, "resp_1", previous=None, items=b"[]", answer=plain, now_s=loop_time_s())
        for refused in (
            await served.send(f"{RESPONSES}/resp_1/cancel"),
            await retrieve(served, "resp_1", "?stream=true"),
            await retrieve(served, response_id, "?stream=true&starting_after=x"),
        ):
            assert refused.status == 400
        assert (await served.send(f"{RESPONSES}/resp_0/cancel")).status == 404


async def test_a_stream_goes_on_without_its_client_and_is_taken_up_again() -> None:
    async with served_calls() as served:
        first = await begin(served, stream=True)
        await served.engine.begin("hi", TEXT[:20])
        assert [event["type"] for event in events(first)][:3] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        await first.leave()
        response_id, seen = events(first)[0]["response"]["id"], numbers(first)[-1]
        second = await retrieve(served, response_id, f"?stream=true&starting_after={seen}")
        await served.engine.answer("hi", TEXT[20:])
        assert numbers(first) + numbers(second) == list(range(numbers(second)[-1] + 1))
        assert text_of(first) + text_of(second) == TEXT
        assert events(second)[-1]["type"] == "response.completed"
        after = await retrieve(served, response_id, f"?stream=true&starting_after={seen}")
        assert events(after) == events(second), "it has ended, and has the same events"
        assert events(await retrieve(served, response_id, f"?stream=true&starting_after={numbers(after)[-1]}")) == []


async def test_a_text_that_is_generated_again_has_the_same_events() -> None:
    async with served_calls(max_attempts=2) as served:
        first = await begin(served, stream=True)
        await served.engine.begin("hi", TEXT[:19])
        begun_with = numbers(first)
        await served.engine.break_off("hi", TEXT[19:21])
        await served.engine.begin("hi", TEXT[:5])
        assert numbers(first) == begun_with
        await served.engine.answer("hi", TEXT[5:])
        assert text_of(first) == TEXT
        assert numbers(first) == list(range(len(numbers(first))))


async def test_a_reader_that_was_told_of_a_longer_text_gets_the_end() -> None:
    async with served_calls(max_attempts=2) as served:
        first = await begin(served, stream=True)
        await served.engine.begin("hi", TEXT)
        await served.engine.break_off("hi", TEXT)
        await served.engine.answer("hi", "no")
        last = events(first)[-1]
        assert last["type"] == "response.completed"
        assert last["response"]["output"][0]["content"][0]["text"] == "no"


async def test_a_response_that_ends_tells_its_events_again() -> None:
    async with served_calls() as served:
        exchange = await begin(served, stream=True)
        await served.engine.answer("hi", TEXT, "length")
        told = events(exchange)[-1]["response"]
        written = b"".join(map(write_event, replayed(told)))
        assert read(written) == events(exchange)


async def test_the_items_of_an_input_come_in_pages() -> None:
    """Each item has an id, the same one each time, by which the next page begins."""
    async with served_calls() as served:
        given = [{"role": "user", "content": f"{number}"} for number in range(45)]
        given[3]["id"] = "mine"
        response_id = await begun(served, given)  # type: ignore[arg-type]
        found, after, sizes = [], "", []
        while True:
            page = (await retrieve(served, response_id, f"/input_items{after}")).json
            sizes.append(len(page["data"]))
            found += page["data"]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = f"?after={page['last_id']}"
        assert sizes == [20, 20, 5]
        assert [item["content"] for item in found] == [item["content"] for item in reversed(given)]
        assert len({item["id"] for item in found}) == 45
        assert found[-4]["id"] == "mine"
        first = (await retrieve(served, response_id, "/input_items?order=asc&limit=2")).json
        assert [item["content"] for item in first["data"]] == ["0", "1"]
        assert first["data"][0]["id"] == found[-1]["id"]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=nothing"])
async def test_a_page_that_cannot_be_is_refused(query: str) -> None:
    async with served_calls() as served:
        response_id = await begun(served)
        refused = await retrieve(served, response_id, f"/input_items?{query}")
        assert (refused.status, refused.json["error"]["param"]) == (400, query.partition("=")[0])
