"""The relay over scripted engines: what reaches engine and client, and what an engine's failure is to both."""

from __future__ import annotations

import msgspec
import pytest

from plait.backends.errors import EngineError, EngineTimeoutError, EngineUnreachableError, NoEngineError
from plait.gateway.asgi import Headers
from plait.gateway.fleet.health import HealthState
from tests.gateway.calls.scripted_engines import (
    BODY,
    JSON,
    LOST,
    STREAM,
    USAGE_EVENT,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    gateway,
)
from tests.gateway.exposed import samples

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
        assert samples(made.registry)['plait_ttft_seconds_count{engine="a",model="m"}'] == 1


async def test_a_usage_event_that_only_the_gateway_asked_for_is_withheld() -> None:
    client = Client()
    async with gateway(FakeHttp(Exchange(pieces=[b"data: 1\n\n", USAGE_EVENT + b"data: [DONE]\n\n"]))) as made:
        await made.deliver(client, body=BODY.replace(b"}", b', "stream": true}'))
        assert client.body == b"data: 1\n\ndata: [DONE]\n\n"
        assert samples(made.registry)['plait_output_tokens_total{engine="a",model="m"}'] == 9


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
        assert len(made.router.engines["b"].view.residency.resident) == len(made.router.tree) == 4


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
