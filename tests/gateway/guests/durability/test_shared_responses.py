"""Responses in the background in gateways that share a store: one goes on with those of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.intake import turns
from plait.gateway.streams import StoredStream
from tests.gateway.guests.durability.durable_gateway import DurableServed
from tests.gateway.guests.durability.shared_gateways import gateway, shared_memory
from tests.gateway.guests.durability.test_durable_responses import ANSWER, put
from tests.gateway.guests.durability.test_shared_sessions import ended, epoch_of, until
from tests.gateway.guests.peers.shared_memory import SharedMemory
from tests.gateway.guests.programs.chained_gateway import settle
from tests.gateway.guests.responses.test_background_api import RESPONSES, TEXT, events, retrieve, text_of


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    return shared_memory(monkeypatch)


async def begun(served: DurableServed) -> str:
    """A new response, which is on its engine."""
    exchange = await ended(await served.send(RESPONSES, {"model": "m", "input": "hi", "background": True}))
    await until(lambda: "hi" in served.engine.running)
    return str(exchange.json["id"])


async def test_another_gateway_goes_on_with_it(shared: SharedMemory) -> None:
    async with gateway("one") as one, gateway("two", max_attempts=3) as two:
        response_id = await begun(one)
        await one.hang()
        shared.give_up(epoch_of(one))
        stream = await retrieve(two, response_id, "?stream=true")
        await until(lambda: "hi" in two.engine.running)
        await two.engine.answer("hi", TEXT)
        assert text_of(await ended(stream)) == TEXT
        assert (await ended(await retrieve(two, response_id))).json["status"] == "completed"


async def test_one_of_a_gateway_that_is_away_is_never_said_to_be_nowhere(
    shared: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway("one") as one, gateway("two") as two:
        await ended(await one.value("x", "1"))
        (tenant,) = one.executor.sessions.tenants
        *_, last = await put(one, tenant, 300)
        await one.hang()
        shared.stale(epoch_of(one))
        body = {"model": "m", "input": "and?", "previous_response_id": last, "background": True}
        for asked in (await retrieve(two, last), await two.send(RESPONSES, body)):
            assert (await ended(asked)).refusal == (503, "gateway_unavailable")
        monkeypatch.setattr(turns, "SLICE_S", -1.0)  # work yields in each turn of the loop
        restores, has_answered = two.durability._made, False

        def later(streams: Sequence[StoredStream]) -> Iterator[None]:
            while not has_answered:
                yield
            yield from restores(streams)

        monkeypatch.setattr(two.durability, "_made", later)
        shared.give_up(epoch_of(one))
        while (asked := await ended(await retrieve(two, last))).status != 200:
            assert asked.refusal == (503, "gateway_unavailable")
        stored = two.gateway.house[StoredResponses]
        assert stored.size_bytes(tenant) < 2 * len(ANSWER), "the others are not restored yet"
        assert (await ended(await retrieve(two, "resp_never"))).status == 404
        has_answered = True
        await until(lambda: stored.size_bytes(tenant) >= 300 * len(ANSWER))


async def _not_at_all(*_: object) -> None: ...


async def test_a_gateway_that_was_given_up_tells_nothing_of_it(
    shared: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway("one") as one:
        response_id = await begun(one)
        stream = await retrieve(one, response_id, "?stream=true")
        monkeypatch.setattr(one.durability, "recover", _not_at_all)  # else it may go on with the response, being alone
        shared.give_up(epoch_of(one))
        assert events(await ended(stream))[-1]["type"] == "error"
        assert not one.gateway.house[StoredResponses]._tenants


async def test_an_end_that_cannot_be_stored_is_not_told(shared: SharedMemory) -> None:
    async with gateway("one") as one:
        response_id = await begun(one)
        stream = await retrieve(one, response_id, "?stream=true")
        one.waits = False
        shared.away = True
        await until(lambda: one.durability.problem is not None)
        await one.engine.answer("hi", TEXT)
        await settle()
        assert events(await ended(stream))[-1]["type"] == "error"
        assert (await ended(await retrieve(one, response_id))).refusal == (503, "store_failed")
        shared.away = False
        await until(lambda: one.durability.problem is None)
        assert (await ended(await retrieve(one, response_id))).json["status"] == "completed"


async def test_a_gateway_that_stops_lets_another_have_it(shared: SharedMemory) -> None:
    async with gateway("one") as one, gateway("two", max_attempts=3) as two:
        response_id = await begun(one)
        one.gateway.begin_stop()
        assert (await ended(await retrieve(one, response_id))).refusal == (503, "gateway_stopping")
        await one.engine.answer("hi", TEXT)
        await until(lambda: not one.engine.running)
        assert (await ended(await retrieve(one, response_id))).refusal == (503, "gateway_stopping")
        assert two.engine.delivered == []
