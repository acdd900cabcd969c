"""Calls that wait for their engine, over the relay: they go when it has room, and leave when their client goes."""

from __future__ import annotations

import asyncio

import pytest

from plait.backends.errors import OverloadedError
from plait.gateway.asgi import ClientGoneError
from tests.gateway.calls.scripted_engines import JSON, WHOLE, Client, Exchange, FakeHttp, Gateway, gateway, until_stuck


def close_gate(made: Gateway) -> None:
    """From now on all slots of the engine are taken."""
    made.router.engines["a"].view.slots = -1


def open_gate(made: Gateway) -> None:
    made.router.engines["a"].view.slots = 0
    made.router.on_room("a")


def whole() -> Exchange:
    return Exchange(headers=JSON, pieces=[WHOLE])


async def test_calls_wait_while_their_engine_is_full_and_go_in_turn() -> None:
    async with gateway(FakeHttp(whole(), whole(), whole())) as made:
        close_gate(made)
        clients = [Client() for _ in range(3)]
        tasks = [asyncio.create_task(made.deliver(client)) for client in clients]
        await until_stuck()
        assert (made.gate.admission.waiting("m"), made.engines["a"].requests) == (3, [])
        open_gate(made)
        async with asyncio.timeout(2):
            await asyncio.gather(*tasks)
        assert [client.status for client in clients] == [200] * 3
        assert made.outcomes() == {("a", "ok"): 3}
        made.gate.admission.check([])


async def test_a_call_whose_client_goes_while_it_waits_is_never_sent() -> None:
    async with gateway(FakeHttp()) as made:
        close_gate(made)
        client = Client()
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        client.gone.set()
        with pytest.raises(ClientGoneError):
            await task
        assert made.gate.admission.waiting("m") == 0
        made.gate.admission.check([])


async def test_what_is_too_much_is_refused_before_it_is_sent() -> None:
    async with gateway(FakeHttp()) as made:
        close_gate(made)
        waiting = asyncio.create_task(made.deliver(Client()))
        await until_stuck()
        made.gate.admission._max_wait_s = 0.0
        with pytest.raises(OverloadedError):
            await made.deliver(Client())
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        made.gate.admission.check([])


async def test_a_refused_call_is_not_counted_as_running() -> None:
    async with gateway(FakeHttp(whole())) as made:
        made.router.health.unreachable("a")
        with pytest.raises(Exception, match="No engine"):
            await made.deliver(Client())
        made.gate.admission.check([])
