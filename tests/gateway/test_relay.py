"""The relay over scripted engines: what reaches engine and client, and that every way out gives the booking back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from backends.errors import EngineError, EngineTimeoutError, EngineUnreachableError, NoEngineError, PlaitError
from backends.http_client import HttpClient
from backends.http_response import Response
from backends.openai_protocol import CompletionRequest, parse_request
from gateway.asgi import ClientGoneError, Headers
from gateway.completion_text import TextTap
from gateway.health import HealthState
from gateway.metrics import Metrics
from gateway.outgoing import OutgoingBody
from gateway.relay import Delivery, EngineLink, Outcome, Relay
from gateway.router import Router
from policy.block_hash import chain, root_hash
from policy.cost_model import CostModel, LongAttention, PiecewiseLinear
from policy.types import Call

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
HASHES = chain(range(256), 64, root_hash("m"))
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
USAGE = b'"usage":{"prompt_tokens":257,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":64}}'
USAGE_EVENT = b'data: {"choices":[],' + USAGE + b"}\n\n"
WHOLE = b'{"choices":[{}],' + USAGE + b"}"
BODY = b'{"model": "m", "prompt": "x"}'
LOST = EngineError("engine lost")


class Exchange:
    """An engine's answer: the pieces of its body, then its end; an error among them breaks off there, None stalls."""

    def __init__(self, status: int = 200, headers: Headers = STREAM, pieces: Sequence[bytes | EngineError | None] = ()):
        self.aborted = False
        self.response = Response(self)
        self.response.status = status
        self.response.headers = list(headers)
        for piece in pieces:
            if piece is None:
                return
            if isinstance(piece, EngineError):
                self.response.fail(piece)
                return
            self.response.push(piece)
        self.response.finish()

    def resume(self) -> None:
        pass

    def fail(self, error: EngineError) -> None:
        self.aborted = True
        self.response.fail(error)


class FakeHttp:
    """Answers one call after the other; None never answers."""

    def __init__(self, *answers: Exchange | PlaitError | None) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[bytes, bytes], bytes]] = []

    async def post(self, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Response:
        self.requests.append((path, dict(headers), body))
        assert len(dict(headers)) == len(headers)
        answer = self.answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, PlaitError):
            raise answer
        assert answer is not None
        return answer.response


class Client:
    """The ASGI side: what was sent to it; `stuck_at` is the number of the message that it does not take."""

    def __init__(self, stuck_at: int | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._stuck_at = stuck_at

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.sent) == self._stuck_at:
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        assert len(dict(self.sent[0]["headers"])) == len(self.sent[0]["headers"])
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def ended(self) -> bool:
        return [message.get("more_body", False) for message in self.sent[1:]][-1:] == [False]


class Gateway:
    """A relay over fake engines that all serve m and report empty caches."""

    def __init__(self, engines: dict[str, FakeHttp], *, key: bytes | None = None, forward_client_key: bool) -> None:
        self.engines = engines
        self.router = Router("round_robin")
        for name in engines:
            self.router.add_engine(name, COSTS)
            self.router.engine_answered(name, {"m": None})
        self.metrics = Metrics(self.router)
        links = {name: EngineLink(cast("HttpClient", http), key) for name, http in engines.items()}
        self.relay = Relay(self.router, links, self.metrics, forward_client_key=forward_client_key)

    async def deliver(self, client: Client, *, headers: Headers = (), body: bytes = BODY) -> None:
        await self.relay.deliver(self.delivery(headers=headers, body=body), client.receive, client.send)

    def delivery(self, *, headers: Headers = (), body: bytes = BODY, **more: Any) -> Delivery:
        call = Call("r1", "m", 257, 64, HASHES)
        outgoing = OutgoingBody(body, parse_request(body, CompletionRequest))
        return Delivery(call, "/v1/completions", headers, outgoing, asyncio.get_running_loop().time(), **more)

    def outcomes(self) -> dict[tuple[str, str], int]:
        """How often a call ended how on which engine."""
        samples = [line for line in self.metrics.text().decode().splitlines() if line.startswith("plait_calls_total{")]
        parts = [line.split('"') for line in samples]
        return {(part[1], part[5]): int(float(part[6].split()[-1])) for part in parts}

    def seconds_booked(self, engine: str) -> float:
        return self.router.engines[engine].view.ledger.window_cost_s()


@asynccontextmanager
async def gateway(
    *engines: FakeHttp, key: bytes | None = None, forward_client_key: bool = False
) -> AsyncIterator[Gateway]:
    """Engines a, b, ...; afterwards nothing may be running or left behind."""
    before = asyncio.all_tasks()
    made = Gateway(dict(zip("abc", engines, strict=False)), key=key, forward_client_key=forward_client_key)
    yield made
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    made.router.check()
    assert all(engine.view.outstanding == 0 for engine in made.router.engines.values())


async def until_stuck() -> None:
    """Until everything waits for something that this test has to do."""
    for _ in range(10):
        await asyncio.sleep(0)


# Answered.


async def test_a_stream_passes_through_byte_by_byte_and_its_usage_settles_the_call() -> None:
    pieces = [b"data: 1\n\nda", b"ta: 2\n\n", USAGE_EVENT, b"data: [DONE]\n\n"]
    client = Client()
    async with gateway(FakeHttp(Exchange(pieces=pieces))) as made:
        await made.deliver(client)
        assert client.body == b"".join(pieces)
        assert (client.status, client.ended) == (200, True)
        assert made.outcomes() == {("a", "ok"): 1}
        assert made.seconds_booked("a") == pytest.approx((0.010 + 0.193) + 9 * 0.011)
        assert b'plait_ttft_seconds_count{engine="a",model="m"} 1.0' in made.metrics.text()


async def test_a_usage_event_that_only_the_gateway_asked_for_is_withheld() -> None:
    client = Client()
    async with gateway(FakeHttp(Exchange(pieces=[b"data: 1\n\n", USAGE_EVENT + b"data: [DONE]\n\n"]))) as made:
        await made.deliver(client, body=BODY.replace(b"}", b', "stream": true}'))
        assert client.body == b"data: 1\n\ndata: [DONE]\n\n"
        assert b'plait_output_tokens_total{engine="a",model="m"} 9.0' in made.metrics.text()


async def test_a_whole_answer_passes_through_with_its_length() -> None:
    client = Client()
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[WHOLE[:9], WHOLE[9:]]))) as made:
        await made.deliver(client)
        assert (client.status, client.body, client.ended) == (200, WHOLE, True)
        assert client.headers[b"content-length"] == str(len(WHOLE)).encode()
        assert made.outcomes() == {("a", "ok"): 1}
        assert made.seconds_booked("a") == pytest.approx((0.010 + 0.193) + 9 * 0.011)


async def test_an_answer_without_usage_leaves_the_prediction() -> None:
    async with gateway(FakeHttp(Exchange(pieces=[b"data: [DONE]\n\n"]), Exchange(pieces=[]))) as made:
        for _ in range(2):
            client = Client()
            await made.deliver(client)
            assert client.ended
        assert made.outcomes() == {("a", "ok"): 2}
        assert len(made.router.engines["a"].view.ledger) == 2


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_an_engines_refusal_passes_through_and_the_call_never_was(status: int) -> None:
    body = b'{"error":{"message":"no","code":7}}'
    headers = [*JSON, (b"retry-after", b"3"), (b"connection", b"close"), (b"server", b"x"), (b"date", b"x")]
    client = Client()
    async with gateway(FakeHttp(Exchange(status, headers, [body])), FakeHttp()) as made:
        await made.deliver(client)
        assert (client.status, client.body, client.ended) == (status, body, True)
        assert client.headers == {
            b"content-type": b"application/json",
            b"retry-after": b"3",
            b"content-length": str(len(body)).encode(),
            b"x-request-id": b"r1",
            b"plait-engine": b"a",
            b"plait-placement": b"round_robin",
            b"plait-cached-tokens": b"0",
        }
        assert made.outcomes() == {("a", "refused"): 1}
        assert (len(made.router.tree), made.seconds_booked("a")) == (0, 0.0)
        assert made.router.engines["a"].health.state is HealthState.UP


# What goes out.


async def test_a_request_carries_the_callers_headers_but_for_one_hops_and_the_gateways() -> None:
    headers = [
        (b"host", b"gateway"), (b"content-length", b"9"), (b"accept-encoding", b"gzip"), (b"connection", b"x"),
        (b"content-type", b"application/json"), (b"plait-priority", b"1"), (b"authorization", b"Bearer client"),
        (b"x-request-id", b"other"), (b"traceparent", b"t"), (b"transfer-encoding", b"chunked"),
    ]  # fmt: skip
    engine = FakeHttp(*(Exchange(headers=JSON, pieces=[b"{}"]) for _ in range(3)))
    expected = {b"content-type": b"application/json", b"traceparent": b"t", b"x-request-id": b"r1"}
    async with gateway(engine) as made:
        await made.deliver(Client(), headers=headers)
    async with gateway(engine, forward_client_key=True) as made:
        await made.deliver(Client(), headers=headers)
    async with gateway(engine, key=b"Bearer engine", forward_client_key=True) as made:
        await made.deliver(Client(), headers=headers)
    assert [path for path, _, _ in engine.requests] == ["/v1/completions"] * 3
    assert [body for _, _, body in engine.requests] == [BODY] * 3
    assert [sent for _, sent, _ in engine.requests] == [
        expected,
        {**expected, b"authorization": b"Bearer client"},
        {**expected, b"authorization": b"Bearer engine"},
    ]


# An engine that fails.


async def test_an_engine_that_cannot_be_reached_is_set_aside_and_the_next_one_asked() -> None:
    unreachable = EngineUnreachableError("no route")
    client = Client()
    async with gateway(FakeHttp(unreachable), FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        await made.deliver(client)
        assert (client.status, client.headers[b"plait-engine"]) == (200, b"b")
        assert made.outcomes() == {("a", "unreachable"): 1, ("b", "ok"): 1}
        assert [engine.health.state for engine in made.router.engines.values()] == [HealthState.DOWN, HealthState.UP]
        assert made.seconds_booked("a") == 0.0
        assert made.router.engines["b"].view.residency.resident_blocks == len(made.router.tree) == 4


async def test_when_none_can_be_reached_the_caller_is_told_to_come_back() -> None:
    client = Client()
    async with gateway(*(FakeHttp(EngineUnreachableError("no route")) for _ in range(3))) as made:
        with pytest.raises(NoEngineError) as caught:
            await made.deliver(client)
        assert (caught.value.status, caught.value.retry_after_s, client.sent) == (503, 1.0, [])
        assert sum(made.outcomes().values()) == 3
        with pytest.raises(NoEngineError) as caught:
            await made.deliver(client)
        assert caught.value.retry_after_s == 1.0
        assert sum(made.outcomes().values()) == 3, "all are set aside: none is asked"


@pytest.mark.parametrize("error", [LOST, EngineTimeoutError("silent")])
async def test_an_engine_lost_before_its_answer_is_an_error_that_is_not_tried_again(error: EngineError) -> None:
    client, other = Client(), FakeHttp()
    async with gateway(FakeHttp(error), other) as made:
        with pytest.raises(EngineError) as caught:
            await made.deliver(client)
        assert (caught.value, client.sent, other.requests) == (error, [], [])
        assert made.outcomes() == {("a", "engine_error"): 1}
        assert len(made.router.tree) == 0


@pytest.mark.parametrize("headers", [STREAM, JSON])
async def test_an_engine_lost_before_the_first_byte_is_still_an_error_response(headers: Headers) -> None:
    client = Client()
    async with gateway(FakeHttp(Exchange(headers=headers, pieces=[LOST]))) as made:
        with pytest.raises(EngineError):
            await made.deliver(client)
        assert client.sent == []
        assert made.outcomes() == {("a", "engine_error"): 1}


async def test_an_engine_lost_in_the_middle_of_a_whole_answer_is_an_error_response() -> None:
    client = Client()
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[WHOLE[:9], LOST]))) as made:
        with pytest.raises(EngineError):
            await made.deliver(client)
        assert client.sent == []
        assert made.outcomes() == {("a", "engine_error"): 1}


@pytest.mark.parametrize("error", [LOST, EngineTimeoutError("engine silent")])
async def test_an_engine_lost_in_mid_stream_becomes_an_error_event_between_events(error: EngineError) -> None:
    client = Client()
    async with gateway(FakeHttp(Exchange(pieces=[b"data: 1\n\ndata: 2\n\ndata: {", error]))) as made:
        await made.deliver(client)
        one, two, last, rest = client.body.split(b"\n\n")
        assert (one, two, rest) == (b"data: 1", b"data: 2", b"")
        body = msgspec.json.decode(last.removeprefix(b"data: "))["error"]
        assert (body["message"], body["type"]) == (error.message, "engine_error")
        assert client.ended
        assert made.outcomes() == {("a", "engine_error"): 1}
        assert made.router.engines["a"].health.state is HealthState.UP


# Calls that are chained to others: what is read on the way, where they go, how they ended.

CHOICE = b'data: {"choices":[{"text":"one"}]}\n\n'


@pytest.mark.parametrize(
    ("exchange", "texts", "problem"),
    [
        (Exchange(pieces=[CHOICE[:9], CHOICE[9:], USAGE_EVENT, b"data: [DONE]\n\n"]), ["one"], None),
        (Exchange(headers=JSON, pieces=[b'{"choices":[{"text":"one"}]}']), ["one"], None),
        (Exchange(pieces=[CHOICE, LOST]), ["one"], "engine lost"),
        (Exchange(400, JSON, [b'{"error":{"message":"no"}}']), [], "refused with status 400: no"),
    ],
    ids=["streamed", "whole", "lost", "refused"],
)
async def test_the_text_is_read_on_its_way_and_the_outcome_told(
    exchange: Exchange, texts: list[str], problem: str | None
) -> None:
    read: list[str] = []
    client = Client()
    async with gateway(FakeHttp(exchange)) as made:
        delivery = made.delivery(text=TextTap(read.append), session="s1")
        assert await made.relay.run(delivery, client.send) == Outcome("a", problem)
        assert (read, client.headers[b"plait-session"], client.ended) == (texts, b"s1", True)


async def test_a_continuation_goes_where_its_beginning_ran_while_that_is_up() -> None:
    engines = [FakeHttp(*(Exchange(headers=JSON, pieces=[WHOLE]) for _ in range(4))) for _ in range(2)]
    async with gateway(*engines) as made:
        went = [await made.relay.run(made.delivery(continues_on="b"), Client().send) for _ in range(3)]
        assert [outcome.engine_id for outcome in went] == ["b", "b", "b"], "though turns are taken"
        made.router.engine_unreachable("b")
        assert (await made.relay.run(made.delivery(continues_on="b"), Client().send)).engine_id == "a"
        assert (await made.relay.run(made.delivery(continues_on="gone"), Client().send)).engine_id == "a"


# A client that goes away, or a gateway that stops, at every point where something is waited for.

POINTS: dict[str, tuple[int, Headers, list[bytes | None] | None, int | None]] = {
    "sending the request": (200, STREAM, None, None),
    "the first byte": (200, STREAM, [None], None),
    "sending the head": (200, STREAM, [b"data: 1\n\n", None], 0),
    "sending an event": (200, STREAM, [b"data: 1\n\n", None], 1),
    "the next event": (200, STREAM, [b"data: 1\n\n", None], None),
    "a whole answer": (200, JSON, [WHOLE[:9], None], None),
    "a refusal": (500, JSON, [b"x", None], None),
    "sending a refusal": (500, JSON, [b"x"], 0),
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
        assert exchange is None or exchange.aborted or not exchange.response.pending
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
        assert exchange is None or exchange.aborted or not exchange.response.pending


@pytest.mark.parametrize("stuck_at", [1, 2])
async def test_a_client_that_goes_away_when_the_engine_has_said_all_changes_no_books(stuck_at: int) -> None:
    """It answered in full, so what it reported counts even if the last bytes reach nobody."""
    exchange = Exchange(headers=JSON, pieces=[WHOLE]) if stuck_at == 1 else Exchange(pieces=[USAGE_EVENT])
    client = Client(stuck_at)
    async with gateway(FakeHttp(exchange)) as made:
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        client.gone.set()
        with pytest.raises(ClientGoneError):
            await task
        assert made.outcomes() == {("a", "ok"): 1}
        assert made.seconds_booked("a") == pytest.approx((0.010 + 0.193) + 9 * 0.011)


async def test_a_client_that_was_gone_already() -> None:
    client = Client()
    client.gone.set()
    async with gateway(FakeHttp(None)) as made:
        with pytest.raises(ClientGoneError):
            await made.deliver(client)
        assert made.outcomes() in ({}, {("a", "client_gone"): 1})


async def test_a_client_that_goes_away_just_as_the_stream_ends_cancels_nothing_else() -> None:
    client = Client()
    exchange = Exchange(pieces=[b"data: 1\n\n", None])
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
        assert made.outcomes() == {("a", "engine_error" if error else "client_gone"): 1}
        assert made.router.engines["a"].view.ledger.mean_output_tokens == 128
