"""Gateways that share a store: one goes on with the sessions of another, and none tells what is not stored."""

from __future__ import annotations

import asyncio

import pytest

from plait.backends.errors import GatewayStoppingError
from plait.gateway.guests.durability.durability import LEAVE_S
from tests.gateway.guests.durability.durable_gateway import DurableServed
from tests.gateway.guests.durability.shared_gateways import gateway, shared_memory
from tests.gateway.guests.peers.shared_memory import MemoryKeeper, SharedMemory
from tests.gateway.guests.programs.chained_gateway import CHAT, Exchange, settle
from tests.waiting import WITHIN_S


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    return shared_memory(monkeypatch)


def epoch_of(served: DurableServed) -> int:
    keeper = served.durability.log._keeper
    assert isinstance(keeper, MemoryKeeper)
    return keeper.epoch


async def until(holds: object) -> None:
    assert callable(holds)
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0.001)


async def ended(exchange: Exchange) -> Exchange:
    await asyncio.wait_for(exchange.task, WITHIN_S)
    return exchange


async def test_another_gateway_goes_on_with_values_and_interrupted_calls(shared: SharedMemory) -> None:
    async with gateway("one") as one, gateway("two", max_attempts=3) as two:
        await ended(await one.value("task", "a game"))
        await ended(await one.submit("Write {{code}}", "code"))
        await until(lambda: "Write " in one.engine.running)
        assert (await ended(await one.get("task"))).json["value"] == "a game"
        await one.hang()
        shared.give_up(epoch_of(one))
        got = await two.get("code")
        await until(lambda: "Write " in two.engine.running)
        await two.engine.answer("Write ", "print()")
        assert (await ended(got)).json["value"] == "print()"
        assert (await ended(await two.get("task"))).json["value"] == "a game"


async def test_a_gateway_that_was_given_up_tells_its_clients_and_begins_anew(shared: SharedMemory) -> None:
    async with gateway("one") as one:
        await ended(await one.value("task", "a game"))
        waiting = await one.get("never")
        chat = await one.chat("Of it", output="out")
        await until(lambda: "Of it" in one.engine.running)
        shared.give_up(epoch_of(one))
        for told in (waiting, chat):
            assert (await ended(told)).refusal == (503, "gateway_given_up")
            assert told.headers[b"retry-after"] == b"1"
        await until(lambda: one.durability._why is None and one.durability.problem is None)
        await until(lambda: len(one.executor.sessions) == 1)
        assert (await ended(await one.get("task"))).json["value"] == "a game", "nobody else was there to take it"


async def test_what_cannot_be_stored_is_not_told(shared: SharedMemory) -> None:
    async with gateway("one") as one:
        await ended(await one.value("task", "a game"))
        one.waits = False
        chat = await one.chat("Of it", output="out")
        await until(lambda: "Of it" in one.engine.running)
        shared.away = True
        await until(lambda: one.durability.problem is not None)
        for refused in (
            await one.value("x", "1"),
            await one.get("task"),
            await one.chat("New", output="o", session="n"),
        ):
            assert (await ended(refused)).refusal == (503, "store_failed")
            assert refused.headers[b"retry-after"] == b"1"
        await one.engine.answer("Of it", "y")
        await settle()
        assert not chat.task.done(), "its value is not stored"
        plain = await one.send(CHAT, {"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
        assert (await ended(plain)).refusal == (503, "no_engine_available")
        shared.away = False
        assert (await ended(chat)).text == "y"
        await until(lambda: one.durability.problem is None)
        assert (await ended(await one.get("out"))).json["value"] == "y"


async def test_a_gateway_that_stops_lets_others_have_its_sessions_one_by_one(shared: SharedMemory) -> None:
    async with gateway("one") as one, gateway("two") as two:
        await ended(await one.value("task", "a game"))
        await one.chat("Of it", output="out", session="busy")
        await until(lambda: "Of it" in one.engine.running)
        waiting = await one.get("never")
        one.gateway.begin_stop()
        assert (await ended(waiting)).refusal == (503, "gateway_stopping")
        await until(lambda: len(two.executor.sessions) == 1)
        assert (await ended(await two.get("task"))).json["value"] == "a game"
        await one.engine.answer("Of it", "y")
        await until(lambda: len(two.executor.sessions) == 2)
        got = await two.send("/v1/get", {"session_id": "busy", "semantic_var_id": "out"})
        assert (await ended(got)).json["value"] == "y"
        assert (await ended(await one.get("task"))).refusal == (503, "gateway_stopping")


async def test_a_session_that_a_program_is_entering_stays_until_it_is_whole(shared: SharedMemory) -> None:
    async with gateway("one") as one, gateway("two") as two:
        await ended(await one.value("task", "a game"))
        (session,) = one.executor.sessions
        session.is_entered = True
        one.gateway.begin_stop()
        await asyncio.sleep(2 * LEAVE_S)
        assert session.ended is None
        assert len(two.executor.sessions) == 0
        session.is_entered = False
        await until(lambda: len(two.executor.sessions) == 1)
        assert isinstance(session.ended, GatewayStoppingError)


async def test_a_session_in_memory_is_claimed_before_its_client_hears_of_it(shared: SharedMemory) -> None:
    async with gateway("one") as one:
        made = await ended(await one.send("/v1/sessions", {}, plait_durable="false"))
        assert made.json["id"] in {key.name for key in shared.owners}
        assert not shared.events
