"""Silent streams: whatever they wait for, their clients get signs of life, and the answer after them."""

from __future__ import annotations

import asyncio

import pytest

from plait.backends.errors import EngineError
from plait.gateway.asgi import HIGH_WATER_BYTES, AsgiSink
from plait.gateway.calls.silent_streams import SILENT_S
from plait.gateway.guests.translation.typed_answers import MESSAGE
from plait.gateway.timer import loop_time_s
from plait.policy.types import Call
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    HASHES,
    JSON,
    LOST,
    STREAM,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    Gateway,
    gateway,
    leaves,
    until_stuck,
)
from tests.waiting import WITHIN_S

EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
SIGN = b": waiting\n\n"


def look(made: Gateway, after_s: float = SILENT_S) -> None:
    made.relay.silent_streams.look(loop_time_s() + after_s)


async def say(exchange: Exchange, *pieces: bytes | EngineError) -> None:
    """The engine sends these pieces, each in a read of its own. An error ends the answer, as DONE does."""
    for piece in pieces:
        if isinstance(piece, EngineError):
            exchange.response.fail(piece)
        else:
            exchange.response.pieces.append(piece)
            if piece == DONE:
                exchange.response.finish()
            exchange.response.wake()
        await until_stuck()


async def begun(made: Gateway, client: Client) -> asyncio.Task[None]:
    task = asyncio.create_task(made.deliver(client))
    await until_stuck()
    return task


async def test_before_the_first_event_a_silent_stream_gets_its_status_and_a_comment() -> None:
    exchange, client = Exchange(pieces=[None]), Client()
    async with gateway(FakeHttp(exchange)) as made:
        call = await begun(made, client)
        look(made, SILENT_S - 1.0)
        await until_stuck()
        assert client.sent == []
        look(made)
        look(made, 2 * SILENT_S - 1.0)
        look(made, 2 * SILENT_S)
        await until_stuck()
        assert (client.status, client.headers[b"x-request-id"], client.body) == (200, b"r1", SIGN * 2)
        await say(exchange, EVENT, FINISH, DONE)
        await call
        assert client.body.startswith(SIGN * 2 + b": plait-engine=a plait-placement=")
        assert client.body.endswith(b"\n\n" + EVENT + FINISH + DONE)
        assert client.ended
        assert made.outcomes() == {("a", "ok"): 1}


async def test_amid_its_events_a_silent_stream_gets_a_comment() -> None:
    exchange, client = Exchange(pieces=[None]), Client()
    async with gateway(FakeHttp(exchange)) as made:
        call = await begun(made, client)
        await say(exchange, EVENT + EVENT[:9])
        look(made)
        await say(exchange, EVENT[9:], FINISH, DONE)
        look(made)
        await call
        look(made)
        assert client.body == EVENT + SIGN + EVENT + FINISH + DONE
        assert client.ended


async def test_nothing_follows_the_last_event_of_a_stream_that_its_engine_leaves_open() -> None:
    exchange, client = Exchange(pieces=[None]), Client()
    async with gateway(FakeHttp(exchange)) as made:
        call = await begun(made, client)
        await say(exchange, EVENT, FINISH + DONE)
        look(made)
        await until_stuck()
        exchange.response.finish()
        await call
        assert client.body == EVENT + FINISH + DONE


async def test_a_sign_of_life_has_the_form_of_the_answer() -> None:
    exchange, client = Exchange(pieces=[None]), Client()
    async with gateway(FakeHttp(exchange)) as made:
        call = asyncio.create_task(made.relay.deliver(made.asked(form=MESSAGE), AsgiSink(client.send)))
        await until_stuck()
        look(made)
        await until_stuck()
        assert client.body == b': waiting\nevent: ping\ndata: {"type": "ping"}\n\n'
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("last", [DONE, None], ids=["ended", "amid"])
async def test_a_client_that_does_not_read_is_told_nothing(last: bytes | None) -> None:
    exchange, client = Exchange(pieces=[None]), Client(stuck_at=1)
    event = b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % (b"x" * HIGH_WATER_BYTES)
    async with gateway(FakeHttp(exchange)) as made:
        call = await begun(made, client)
        await say(exchange, event, *([FINISH, last] if last is not None else []))
        look(made)
        (delivery,) = made.relay.silent_streams._told_s
        assert SIGN not in b"".join(message.get("body", b"") for message in delivery.sink._messages)  # type: ignore[attr-defined]
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_a_call_that_moves_after_its_client_was_told_is_answered_in_the_same_stream() -> None:
    lost, well, client = Exchange(pieces=[None]), Exchange(headers=STREAM, pieces=[FINISH, DONE]), Client()
    async with gateway(FakeHttp(lost), FakeHttp(well)) as made:
        call = await begun(made, client)
        look(made)
        await say(lost, LOST)
        await call
        assert client.status == 200
        assert b": plait-engine=b" in client.body
        assert client.body.endswith(FINISH + DONE)
        assert made.outcomes() == {("a", "failed"): 1, ("b", "ok"): 1}


async def test_a_call_that_fails_after_its_client_was_told_ends_with_an_error_event() -> None:
    exchanges, client = [Exchange(pieces=[None]) for _ in range(3)], Client()
    async with gateway(FakeHttp(*exchanges)) as made:
        call = await begun(made, client)
        look(made)
        await say(exchanges[0], EngineError("no luck", code="engine_garbled"))
        made.router.health.unreachable("a")
        for exchange in exchanges[1:]:
            await say(exchange, LOST)
        await asyncio.wait_for(call, WITHIN_S)
        assert client.body.startswith(SIGN + b'data: {"error":')
        assert client.ended


async def test_an_answer_without_a_stream_becomes_events_of_a_stream_that_was_told() -> None:
    exchange, client = Exchange(headers=JSON, pieces=[None]), Client()
    async with gateway(FakeHttp(exchange)) as made:
        call = asyncio.create_task(made.deliver_call(client, Call("r1", "m", 257, 64, HASHES)))
        await until_stuck()
        look(made)
        exchange.response.pieces.append(WHOLE)
        exchange.response.finish()
        await call
        assert client.body.startswith(SIGN)
        assert client.body.endswith(b"data: [DONE]\n\n")
        assert b"error" not in client.body
        assert client.ended


async def test_whole_answers_and_clients_that_have_gone_are_told_nothing() -> None:
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]), None)) as made:
        await made.deliver_whole(Client())
        await leaves(made, client := Client())
        look(made)
        assert client.sent == []
        assert made.relay.silent_streams._told_s == {}
