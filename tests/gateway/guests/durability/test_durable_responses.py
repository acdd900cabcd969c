"""Responses in the background over several gateways, each of which is killed: none is lost, and none is made twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from plait.gateway.guests.durability.durability import RecoveringError
from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.intake import turns
from plait.gateway.streams import SESSION, Change
from plait.gateway.timer import loop_time_s
from tests.gateway.guests.durability.durable_gateway import DurableServed, durable, held_commits
from tests.gateway.guests.programs.chained_gateway import settle
from tests.gateway.guests.responses.test_background_api import TEXT, begin, begun, events, numbers, retrieve, text_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "plait.db"


ANSWER = b'{"output": []}' + b" " * 100


async def put(served: DurableServed, tenant: str, count: int) -> list[str]:
    """Store so many responses. Returns their ids."""
    names = [f"resp_{number}" for number in range(count)]
    for name in names:
        served.gateway.house[StoredResponses].put(
            tenant, name, previous=None, items=b"[]", answer=ANSWER, now_s=loop_time_s()
        )
    await served.stored()
    return names


async def found(served: DurableServed, response_id: str) -> Any:
    return (await retrieve(served, response_id)).json


async def cancel(served: DurableServed, response_id: str) -> Any:
    return (await served.send(f"/v1/responses/{response_id}/cancel")).json


async def test_one_that_was_interrupted_is_made_again_under_its_id(path: Path) -> None:
    async with durable(path, max_attempts=2) as first:
        stream = await begin(first, stream=True, metadata={"a": "b"})
        await first.engine.begin("hi", TEXT[:20])
        told = events(stream)
        response_id, created_s = told[0]["response"]["id"], told[0]["response"]["created_at"]
    async with durable(path, max_attempts=2) as second:
        assert list(second.engine.running) == ["hi"]
        again = await retrieve(second, response_id, f"?stream=true&starting_after={told[-1]['sequence_number']}")
        await second.engine.answer("hi", TEXT)
        await second.stored()
        assert numbers(stream)[: len(told)] + numbers(again) == list(range(len(told) + len(numbers(again))))
        assert "".join(event.get("delta", "") for event in told) + text_of(again) == TEXT
        completed = await found(second, response_id)
        assert (completed["status"], completed["created_at"]) == ("completed", created_s)
        assert completed["metadata"] == {"a": "b"}


async def test_one_that_has_ended_is_there_and_not_made_again(path: Path) -> None:
    async with durable(path) as first:
        response_id = await begun(first)
        await first.engine.answer("hi", TEXT)
        completed = await found(first, response_id)
    async with durable(path) as second:
        assert (second.engine.delivered, await found(second, response_id)) == ([], completed)
        stream = await retrieve(second, response_id, "?stream=true")
        assert text_of(stream) == TEXT
        assert events(stream)[-1]["response"] == completed
        await begun(second, "and?", previous_response_id=response_id)
        assert list(second.engine.running) == [f"hi|{TEXT}|and?"]


async def test_what_is_asked_for_is_restored_before_the_rest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with durable(path) as first:
        await first.value("x", "1")
        (tenant,) = first.executor.sessions.tenants
        names = await put(first, tenant, 20)
        await first.send("/v1/variables", {"session_id": "last", "semantic_var_id": "x", "value": "2"})
    monkeypatch.setattr(turns, "SLICE_S", -1.0)  # one in each turn of the loop
    second = DurableServed(path)
    recovering, stored = asyncio.ensure_future(second.recover()), second.gateway.house[StoredResponses]
    while not stored.size_bytes(tenant):  # noqa: ASYNC110 - as a client that comes again
        await asyncio.sleep(0)
    with pytest.raises(RecoveringError):
        second.durability.check(is_whole=True)
    assert stored.get(tenant, names[-1], loop_time_s()).answer == ANSWER
    assert second.executor.sessions.find(tenant, "last", loop_time_s()).values == {"x": "2"}
    stored.put(tenant, names[-2], previous=None, items=b"[]", answer=b"{}", now_s=loop_time_s())
    stored.delete(tenant, names[-3], loop_time_s())
    assert stored.size_bytes(tenant) < 10 * len(ANSWER), "most are not restored yet"
    await recovering
    second.durability.check(is_whole=True)
    assert [name for name in names if not stored.has(tenant, name)] == [names[-3]]
    assert stored.get(tenant, names[-2], loop_time_s()).answer == b"{}"
    await second.kill()
    async with durable(path) as third:
        assert [name for name in names if not third.gateway.house[StoredResponses].has(tenant, name)] == [names[-3]]
        assert third.gateway.house[StoredResponses].get(tenant, names[-2], loop_time_s()).answer == b"{}"


async def test_one_that_was_cancelled_stays_so(path: Path) -> None:
    async with durable(path) as first:
        response_id = await begun(first)
        cancelled = await cancel(first, response_id)
        assert cancelled["status"] == "cancelled"
    async with durable(path) as second:
        assert (second.engine.delivered, await found(second, response_id)) == ([], cancelled)
        assert await cancel(second, response_id) == cancelled


async def test_one_that_was_deleted_is_gone(path: Path) -> None:
    async with durable(path) as first:
        response_id = await begun(first)
        await first.send(f"/v1/responses/{response_id}", method="DELETE")
    async with durable(path) as second:
        assert second.engine.delivered == []
        assert (await retrieve(second, response_id)).status == 404


async def test_one_that_is_started_too_often_has_failed(path: Path) -> None:
    async with durable(path, max_attempts=1) as first:
        response_id = await begun(first)
    async with durable(path, max_attempts=1) as second:
        failed = await found(second, response_id)
        assert (second.engine.delivered, failed["status"]) == ([], "failed")
        assert "started 1 times" in failed["error"]["message"]
    async with durable(path, max_attempts=1) as third:
        assert await found(third, response_id) == failed


async def test_nothing_is_told_before_it_is_stored(path: Path) -> None:
    async with durable(path) as served:
        with held_commits(served):
            queued = await begin(served)
            assert queued.messages == []
        await served.stored()
        response_id = queued.json["id"]
        stream = await retrieve(served, response_id, "?stream=true")
        with held_commits(served):
            await served.engine.answer("hi", TEXT)
            getting = await retrieve(served, response_id)
            assert "response.completed" not in [event["type"] for event in events(stream)]
            assert getting.messages == []
        await served.stored()
        assert (events(stream)[-1]["type"], getting.json["status"]) == ("response.completed", "completed")


async def test_the_end_of_the_session_and_the_response_are_one_commit(path: Path) -> None:
    async with durable(path) as served:
        response_id = await begun(served)
        written: list[list[tuple[str, bool]]] = []
        append = served.durability.log.append

        def noted(changes: Sequence[Change]) -> None:
            written.append([(change.stream.kind, change.data is None) for change in changes])
            append(changes)

        served.durability.log.append = noted  # type: ignore[method-assign]
        await cancel(served, response_id)
        assert ("response", False) in written[0]
        assert (SESSION, True) in written[0]


async def test_the_next_gateway_goes_on_with_it(path: Path) -> None:
    async with durable(path, max_attempts=2) as first:
        ended, cut = await begun(first, "ends"), await begun(first, "is cut")
        first.gateway.begin_stop()
        await settle()
        await first.engine.answer("ends", TEXT)
        await first.stored()
    async with durable(path, max_attempts=2) as second:
        assert list(second.engine.running) == ["is cut"]
        assert (await found(second, ended))["status"] == "completed"
        await second.engine.answer("is cut", TEXT)
        assert (await found(second, cut))["status"] == "completed"


async def test_one_that_is_to_be_in_memory_ends_with_its_gateway(path: Path) -> None:
    async with durable(path) as first:
        body = {"model": "m", "input": "hi", "background": True}
        exchange = await first.send("/v1/responses", body, plait_durable="false")
        response_id = exchange.json["id"]
    async with durable(path) as second:
        assert (await retrieve(second, response_id)).status == 404
