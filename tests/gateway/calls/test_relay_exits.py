"""A client that goes away from the relay, or a gateway that stops: every way out gives the booking back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from plait.backends.errors import EngineError, EngineGarbledError, EngineTimeoutError, LimitError
from plait.gateway.asgi import AsgiSink, ClientGoneError, Headers, MessageSink, Nowhere, Sink
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    JSON,
    LOST,
    STREAM,
    USAGE,
    USAGE_EVENT,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    gateway,
    leaves,
    until_stuck,
)
from tests.gateway.server.fake_connection import FakeConnection

POINTS: dict[str, tuple[int, Headers, list[bytes | None] | None, int | None]] = {
    "sending the request": (200, STREAM, None, None),
    "the first byte": (200, STREAM, [None], None),
    "sending the head": (200, STREAM, [b"data: 1\n\n", None], 0),
    "sending an event": (200, STREAM, [b"data: 1\n\n", None], 1),
    "the next event": (200, STREAM, [b"data: 1\n\n", None], None),
    "a whole answer": (200, JSON, [WHOLE[:9], None], None),
    "a refusal": (400, JSON, [b"x", None], None),
    "sending a refusal": (400, JSON, [b"x"], 0),
}
"""What the engine answers (None: nothing, or nothing more), and the message to the client that is not taken."""


def stuck(point: str) -> tuple[Exchange | None, Client]:
    status, headers, pieces, stuck_at = POINTS[point]
    return None if pieces is None else Exchange(status, headers, pieces), Client(stuck_at)


@pytest.mark.parametrize("point", POINTS)
async def test_a_client_that_goes_away_ends_the_call_on_its_engine(point: str) -> None:
    exchange, client = stuck(point)
    async with gateway(FakeHttp(exchange)) as made:
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        assert (task.done(), made.router.engines["a"].view.outstanding) == (False, 1)
        client.gone.set()
        with pytest.raises(ClientGoneError):
            await task
        assert exchange is None or exchange.aborted or exchange.response.source is None
        assert made.outcomes() == {("a", "refused" if point == "sending a refusal" else "client_gone"): 1}
        assert not client.ended or not client.sent


@pytest.mark.parametrize("point", POINTS)
async def test_a_gateway_that_stops_gives_everything_back(point: str) -> None:
    exchange, client = stuck(point)
    async with gateway(FakeHttp(exchange)) as made:
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert exchange is None or exchange.aborted or exchange.response.source is None


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_when_the_engine_has_said_all_changes_no_books(streamed: bool) -> None:
    """It answered in full, so what it reported counts even if the last bytes reach nobody."""
    exchange = Exchange(pieces=[FINISH + USAGE_EVENT + DONE]) if streamed else Exchange(headers=JSON, pieces=[WHOLE])
    client = Client(stuck_at=1)
    async with gateway(FakeHttp(exchange)) as made:
        await leaves(made, client)
        assert made.outcomes() == {("a", "ok"): 1}
        assert made.seconds_booked("a") == pytest.approx((0.010 + 0.193) + 9 * 0.011)


async def test_a_client_that_goes_once_it_has_the_last_event_got_its_answer() -> None:
    """The engine has not ended its stream yet: SDKs close the connection at the last event."""
    exchange = Exchange(200, STREAM, [FINISH, USAGE_EVENT, DONE, None])
    async with gateway(FakeHttp(exchange)) as made:
        await leaves(made, Client())
        assert made.outcomes() == {("a", "ok"): 1}
        assert made.router.engines["a"].view.outstanding == 0


async def test_a_gateway_that_stops_while_it_gives_a_call_up() -> None:
    async with gateway(FakeHttp(None), FakeHttp(None)) as made:
        task = asyncio.create_task(made.deliver(Client()))
        await until_stuck()
        (booking,) = made.router.engines["a"].progress.waiting
        assert booking.give_up is not None
        booking.give_up(EngineTimeoutError("it has forgotten the call"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.outcomes() == {("a", "failed"): 1, ("b", "client_gone"): 1}, "it has left both"


async def test_a_client_that_was_gone_already() -> None:
    client = Client()
    client.gone.set()
    async with gateway(FakeHttp(None)) as made:
        with pytest.raises(ClientGoneError):
            await made.deliver(client)
        assert made.outcomes() in ({}, {("a", "client_gone"): 1})


async def test_a_client_that_goes_away_just_as_the_stream_ends_cancels_nothing_else() -> None:
    client = Client()
    exchange = Exchange(pieces=[FINISH + DONE, None])
    async with gateway(FakeHttp(exchange)) as made:

        async def deliver_and_go_on() -> str:
            await made.deliver(client)
            await until_stuck()
            return "went on"

        task = asyncio.create_task(deliver_and_go_on())
        await until_stuck()
        client.gone.set()
        exchange.response.finish()
        assert await task == "went on"
        assert made.outcomes() == {("a", "ok"): 1}


async def test_a_gateway_that_stops_as_the_client_goes_stops() -> None:
    client = Client()
    async with gateway(FakeHttp(None)) as made:
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        client.gone.set()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("error", [LOST, None])
async def test_a_broken_off_streams_usage_so_far_is_no_calls_length(error: EngineError | None) -> None:
    """Engines that report their usage with every token would otherwise make outputs look short."""
    counting = b'data: {"choices":[{}],' + USAGE + b"}\n\n"
    client = Client()
    async with gateway(FakeHttp(Exchange(pieces=[counting, error]))) as made:
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        client.gone.set()
        await asyncio.gather(task, return_exceptions=True)
        assert made.outcomes() == {("a", "failed" if error else "client_gone"): 1}
        assert made.router.engines["a"].view.ledger.mean_output_tokens == 128


class Held:
    """Bytes that count, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size, self.most = limit, 0, 0

    def hold(self, size_bytes: int) -> None:
        if self.size + size_bytes > self.limit:
            raise LimitError("too much")
        self.size += size_bytes
        self.most = max(self.most, self.size)

    def free(self, size_bytes: int) -> None:
        self.size -= size_bytes


async def test_an_answer_that_is_not_streamed_counts_while_it_comes() -> None:
    client, held = Client(), Held(1_000)
    exchange = Exchange(headers=JSON, pieces=[WHOLE[:50], None])
    async with gateway(FakeHttp(exchange)) as made:
        task = asyncio.create_task(made.relay.run(made.asked(answer_bytes=held), AsgiSink(client.send)))
        await until_stuck()
        assert held.size == 50
        exchange.response.pieces.append(WHOLE[50:])
        exchange.response.finish()
        await task
        assert (held.size, held.most, client.body) == (0, len(WHOLE), WHOLE)


async def test_an_answer_that_may_not_be_held_is_given_up() -> None:
    held = Held(60)
    exchange = Exchange(headers=JSON, pieces=[WHOLE[:50], None])
    async with gateway(FakeHttp(exchange)) as made:
        task = asyncio.create_task(made.relay.run(made.asked(answer_bytes=held), AsgiSink(Client().send)))
        await until_stuck()
        exchange.response.pieces.append(WHOLE[50:])
        exchange.response.wake()
        with pytest.raises(LimitError):
            await task
        assert (held.size, exchange.aborted) == (0, True)


@pytest.mark.parametrize(
    "sink", [Nowhere(), AsgiSink(Client().send), FakeConnection().client], ids=lambda s: type(s).__name__
)
async def test_a_call_whose_owner_is_cancelled_leaves_its_engine(sink: Sink) -> None:
    async with gateway(FakeHttp(None)) as made:
        task = asyncio.create_task(made.relay.run(made.asked(), sink))
        await until_stuck()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.outcomes() == {("a", "client_gone"): 1}


class Refusing(MessageSink):
    """Takes the head and one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def put(self, _message: Any) -> None:
        if self.taken == 2:
            raise LimitError("no more")
        self.taken += 1


async def test_what_a_client_cannot_be_sent_is_told_to_it() -> None:
    """As by the translation of an answer that is none in the client's API."""

    async def send(_message: Any) -> None:
        raise EngineGarbledError("no answer")

    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        with pytest.raises(EngineGarbledError):
            await made.relay.deliver(made.asked(), AsgiSink(send))
        assert made.outcomes() == {("a", "failed"): 1}
        assert made.ending.status == EngineGarbledError.status


async def test_a_defect_as_a_call_is_placed_again_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(FakeHttp(LOST), FakeHttp()) as made:

        def defective(*_: Any, **__: Any) -> None:
            raise KeyError("a defect")

        delivered = asyncio.create_task(made.relay.deliver(made.asked(), AsgiSink(Client().send)))
        await asyncio.sleep(0)
        monkeypatch.setattr(made.router, "select", defective)
        with structlog.testing.capture_logs() as lines, pytest.raises(KeyError):
            await delivered
        assert [(line["outcome"], line["status"]) for line in lines if line["event"] == "call"] == [("defect", 500)]


@pytest.mark.parametrize("end", [FINISH, LOST], ids=["goes on", "lost"])
async def test_a_sink_that_takes_no_more_ends_the_call(end: bytes | EngineError) -> None:
    async with gateway(FakeHttp(Exchange(pieces=[]))) as made:
        (exchange,) = made.engines["a"].answers
        assert isinstance(exchange, Exchange)
        exchange.response.source = exchange
        exchange.response.pieces.append(FINISH)
        sink = Refusing()
        running = asyncio.create_task(made.relay.run(made.asked(), sink))
        await until_stuck()
        assert sink.taken == 2
        if isinstance(end, EngineError):
            exchange.fail(end)
        else:
            exchange.response.pieces.append(end)
            exchange.response.wake()
        if isinstance(end, EngineError):
            assert (await running).problem is end
        else:
            with pytest.raises(LimitError):
                await running


async def test_a_defect_at_the_end_of_a_call_is_told_to_whoever_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        settle = made.router.settle

        def defective(*arguments: Any) -> None:
            settle(*arguments)
            raise RuntimeError("a defect")

        monkeypatch.setattr(made.router, "settle", defective)
        with pytest.raises(RuntimeError, match="a defect"):
            await made.deliver(Client())
        assert made.gate.admission._uses[""].running == 0
        assert made.outcomes() == {}, "it is in no engine's books, or twice"


async def test_a_defect_as_a_call_is_sent_ends_its_booking(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(FakeHttp()) as made:
        monkeypatch.setattr(made.relay._upstream, "_links", {})
        with pytest.raises(KeyError):
            await made.relay.deliver(made.asked(), AsgiSink(Client().send))
        assert made.seconds_booked("a") == 0
        assert made.outcomes() == {("a", "defect"): 1}
        assert (made.ending.status, made.ending.outcome) == (500, "defect")
