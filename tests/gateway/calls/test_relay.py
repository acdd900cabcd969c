"""The relay over scripted engines: what reaches engine and client, and what an engine's failure is to both."""

from __future__ import annotations

import asyncio
import copy
import gc
from contextlib import suppress

import msgspec
import pytest

from plait.backends.errors import (
    EngineError,
    EngineLostError,
    EngineTimeoutError,
    EngineUnreachableError,
    NoEngineError,
    PlaitError,
)
from plait.gateway.asgi import AsgiSink
from plait.gateway.calls.call import Attempt
from plait.gateway.calls.delivery import Delivery
from plait.gateway.fleet.health import HealthState
from tests.gateway.calls.scripted_engines import (
    BODY,
    DONE,
    FINISH,
    JSON,
    LOST,
    USAGE_EVENT,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    gateway,
    until_stuck,
)
from tests.gateway.exposed import samples
from tests.invariants import check_retries

# Answered.


@pytest.mark.parametrize(
    "answer",
    [Exchange(pieces=[FINISH + USAGE_EVENT, DONE]), LOST, Exchange(headers=JSON, pieces=[b"x" * 4_000, None])],
    ids=["whole", "lost", "too large"],
)
async def test_nothing_of_a_call_is_left_to_the_garbage_collector(answer: Exchange | EngineError) -> None:
    """The gateway seldom collects: what a call leaves in cycles would be its growth."""
    async with gateway(*(FakeHttp(answer) for _ in "abc")) as made:
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            with suppress(PlaitError):
                await made.deliver(Client())
            made.seen.ended_calls.clear()
            gc.collect()
            assert [one for one in gc.garbage if isinstance(one, Delivery | Attempt)] == []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


async def test_a_stream_passes_through_byte_by_byte_and_its_usage_settles_the_call() -> None:
    pieces = [b"data: 1\n\nda", b"ta: 2\n\n", FINISH + USAGE_EVENT, DONE]
    client = Client()
    async with gateway(FakeHttp(Exchange(pieces=pieces))) as made:
        await made.deliver(client)
        assert client.body == b"".join(pieces)
        assert (client.status, client.ended) == (200, True)
        assert made.outcomes() == {("a", "ok"): 1}
        assert made.seconds_booked("a") == pytest.approx((0.010 + 0.193) + 9 * 0.011)
        assert samples(made.registry)['plait_ttft_seconds_count{engine="a",model="m"}'] == 1


async def test_clients_get_no_numbers_that_json_lacks() -> None:
    answer = WHOLE.replace(b'"cached_tokens":64', b'"cached_tokens":NaN')
    client = Client()
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[answer]))) as made:
        await made.deliver(client)
        assert msgspec.json.decode(client.body)["usage"]["prompt_tokens_details"] == {"cached_tokens": None}
        assert client.headers[b"content-length"] == b"%d" % len(client.body)


async def test_nginx_may_not_keep_the_events_of_a_stream_whatever_its_engine_says() -> None:
    buffered = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"yes")]
    client = Client()
    async with gateway(FakeHttp(Exchange(headers=buffered, pieces=[FINISH, DONE]))) as made:
        await made.deliver(client)
        assert client.headers[b"x-accel-buffering"] == b"no"


async def test_a_usage_event_that_only_the_gateway_asked_for_is_withheld() -> None:
    client = Client()
    async with gateway(FakeHttp(Exchange(pieces=[FINISH, USAGE_EVENT + DONE]))) as made:
        await made.deliver(client, body=BODY.replace(b"}", b', "stream": true}'))
        assert client.body == FINISH + DONE
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
    whole = Exchange(headers=JSON, pieces=[b'{"choices":[{"finish_reason":"stop"}]}'])
    async with gateway(FakeHttp(Exchange(pieces=[FINISH + DONE]), whole)) as made:
        for _ in range(2):
            client = Client()
            await made.deliver(client)
            assert client.ended
        assert made.outcomes() == {("a", "ok"): 2}
        assert len(made.router.engines["a"].view.ledger) == 2


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_refusal_that_is_the_callers_fault_passes_through_and_the_call_never_was(status: int) -> None:
    body = b'{"error":{"message":"no","code":7}}'
    headers = [*JSON, (b"retry-after", b"3"), (b"connection", b"close, x-hop"), (b"server", b"x"), (b"date", b"x")]
    headers += [(b"x-hop", b"1"), (b"plait-engine", b"z"), (b"set-cookie", b"a=b"), (b"plait-Placement", b"z")]
    client = Client()
    async with gateway(FakeHttp(Exchange(status, headers, [body])), FakeHttp()) as made:
        await made.deliver(client)
        assert (client.status, client.body, client.ended) == (status, body, True)
        client.headers.pop(b"plait-waited-s", None)  # on a busy machine
        assert client.headers == {
            b"content-type": b"application/json",
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
    engine = FakeHttp(*(Exchange(headers=JSON, pieces=[WHOLE]) for _ in range(3)))
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
        assert made.outcomes() == {("a", "failed"): 1, ("b", "ok"): 1}
        assert [engine.health.state for engine in made.router.engines.values()] == [HealthState.DOWN, HealthState.UP]
        assert made.seconds_booked("a") > 0.0, "a fast failure must not look cheap"
        assert made.router.engines["b"].view.residency.resident.blocks == len(made.router.tree) == 4


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


FAILURES: dict[str, EngineError | Exchange] = {
    "closed": LOST,
    "timeout": EngineTimeoutError("silent"),
    "lost before the first byte": Exchange(pieces=[LOST]),
    "lost in the middle of a whole answer": Exchange(headers=JSON, pieces=[WHOLE[:9], LOST]),
    "no event": Exchange(pieces=[]),
    "an error as the first event": Exchange(pieces=[b'data: {"error":{"message":"dead","code":500}}\n\n', DONE]),
    "not JSON": Exchange(headers=JSON, pieces=[b"<html>http://10.0.0.7</html>"]),
    "no choices": Exchange(headers=JSON, pieces=[b"{}"]),
    "given up": Exchange(headers=JSON, pieces=[b'{"choices":[{"finish_reason":"abort"}]}']),
    "redirected": Exchange(302, JSON, [b""]),
    "without content": Exchange(204, JSON, [b""]),
    **{
        str(status): Exchange(status, JSON, [b'{"error":{"message":"no"}}'])
        for status in (408, 429, 500, 502, 503, 504)
    },
}


def fresh(failure: EngineError | Exchange) -> EngineError | Exchange:
    return copy.deepcopy(failure)


@pytest.mark.parametrize("name", FAILURES)
async def test_a_call_that_an_engine_fails_before_the_first_byte_goes_to_another(name: str) -> None:
    client = Client()
    async with gateway(FakeHttp(fresh(FAILURES[name])), FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        await made.deliver(client)
        assert (client.status, client.body, client.headers[b"plait-engine"]) == (200, WHOLE, b"b")
        assert made.outcomes() == {("a", "failed"): 1, ("b", "ok"): 1}
        assert made.router.engines["a"].health.state is HealthState.SUSPECT
        check_retries(made.router.retries, 0)


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        (EngineTimeoutError("silent"), 504, "silent"),
        (Exchange(503, [*JSON, (b"retry-after", b"7")], [b'{"error":{"message":"full"}}']), 503, "status 503: full"),
        (Exchange(429, JSON, [b"<html>http://10.0.0.7</html>"]), 429, "engine a answered with status 429"),
    ],
)
async def test_when_all_engines_fail_the_client_gets_an_error_and_when_to_come_back(
    failure: EngineError | Exchange, status: int, words: str
) -> None:
    client = Client()
    async with gateway(FakeHttp(fresh(failure))) as made:
        with pytest.raises(EngineError) as caught:
            await made.deliver(client)
        assert (caught.value.status, client.sent) == (status, [])
        assert words in caught.value.message
        assert "10.0.0.7" not in caught.value.message
        assert caught.value.retry_after_s == (7.0 if status == 503 else 1.0)


async def test_an_engine_that_refuses_its_own_key_failed_the_call() -> None:
    refused = Exchange(401, JSON, [b'{"error":{"message":"no key"}}'])
    client = Client()
    async with gateway(FakeHttp(refused), FakeHttp(Exchange(headers=JSON, pieces=[WHOLE])), key=b"Bearer k") as made:
        await made.deliver(client)
        assert client.headers[b"plait-engine"] == b"b"


async def test_the_same_engine_is_tried_again_if_there_is_no_other() -> None:
    client = Client()
    async with gateway(FakeHttp(LOST, Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        await made.deliver(client)
        assert (client.status, made.outcomes()) == (200, {("a", "failed"): 1, ("a", "ok"): 1})


async def test_three_failures_in_a_row_eject_an_engine_and_move_the_calls_that_wait_there() -> None:
    sick, well = (
        FakeHttp(*[fresh(FAILURES["500"]) for _ in range(3)]),
        FakeHttp(*[Exchange(headers=JSON, pieces=[WHOLE]) for _ in range(4)]),
    )
    async with gateway(sick, well) as made:
        for _ in range(4):
            await made.deliver(Client())
        health = made.router.engines["a"].health
        assert (health.state, health.cause, sick.lost) == (HealthState.EJECTED, "status_500", [("status_500", True)])
        assert made.outcomes()["b", "ok"] == 4


async def test_retries_beyond_the_budget_are_refused() -> None:
    sick, well = FakeHttp(LOST), FakeHttp()
    async with gateway(sick, well) as made:
        for _ in range(3):
            assert made.router.retries.take("m")
        with pytest.raises(EngineError):
            await made.deliver(Client())
        assert samples(made.registry)['plait_retries_refused_total{model="m",why="budget"}'] == 1


async def test_ranks_that_go_out_together_use_up_no_budget() -> None:
    """Each would be charged for its first failures, and a server has more of them than the budget."""
    sick, well = FakeHttp(LOST), FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]))
    async with gateway(sick, well) as made:
        engines = made.router.engines
        engines["a"].address = engines["b"].address = "server"
        made.router.addresses["server"] = [engines["a"], engines["b"]]
        engines["b"].health.state = HealthState.SUSPECT
        for _ in range(3):
            assert made.router.retries.take("m")
        await made.deliver(Client())
        assert made.outcomes()["b", "ok"] == 1


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
        assert made.outcomes() == {("a", "failed"): 1}
        assert made.router.engines["a"].health.state is HealthState.SUSPECT


@pytest.mark.parametrize("pieces", [None, [None]], ids=["no head", "no body"])
async def test_a_call_that_its_engine_has_forgotten_goes_to_another(pieces: list[None] | None) -> None:
    forgotten = None if pieces is None else Exchange(pieces=pieces)
    client = Client()
    async with gateway(FakeHttp(forgotten), FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        (booking,) = made.router.engines["a"].progress.waiting
        assert booking.give_up is not None
        booking.give_up(EngineTimeoutError("it has forgotten the call"))
        await task
        assert client.headers[b"plait-engine"] == b"b"
        assert made.outcomes() == {("a", "failed"): 1, ("b", "ok"): 1}


async def test_a_call_that_is_better_tried_elsewhere_moves_once_and_no_engine_is_at_fault() -> None:
    exchanges, client = [Exchange(0, pieces=[None]) for _ in range(2)], Client()
    async with gateway(*map(FakeHttp, exchanges)) as made:
        task = asyncio.create_task(made.deliver(client))
        for engine in "ab":
            await until_stuck()
            (booking,) = made.router.engines[engine].progress.waiting
            assert booking.give_up is not None
            booking.give_up(EngineLostError("it has sent nothing to any call"))
        await until_stuck()
        assert list(made.router.engines["b"].progress.waiting) == [booking], "there it stays"
        assert made.router.engines["a"].health.state is HealthState.UP
        response = exchanges[1].response
        response.status, response.headers, response.pieces = 200, JSON, [WHOLE]
        response.finish()
        await task
        assert client.headers[b"plait-engine"] == b"b"


async def test_a_call_that_no_other_engine_can_take_stays() -> None:
    exchange, client = Exchange(0, pieces=[None]), Client()
    async with gateway(FakeHttp(exchange), FakeHttp()) as made:
        made.router.health.answered("a", {"m": 100_000})
        made.router.health.answered("b", {"m": 2})
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        (booking,) = made.router.engines["a"].progress.waiting
        assert booking.give_up is not None
        booking.give_up(EngineLostError("it serves later calls"))
        await until_stuck()
        assert list(made.router.engines["a"].progress.waiting) == [booking]
        exchange.response.status, exchange.response.headers, exchange.response.pieces = 200, JSON, [WHOLE]
        exchange.response.finish()
        await task
        assert client.status == 200


async def test_a_call_that_avoids_all_other_engines_is_sent_to_one_without_a_pause() -> None:
    """It was refused by the only engine that it did not avoid, and has failed on none."""
    too_long = Exchange(400, JSON, [b'{"error":{"message":"This model\'s maximum context length is 9 tokens"}}'])
    client = Client()
    async with gateway(FakeHttp(too_long), FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        asked = made.asked(avoids=frozenset("b"))
        await made.relay.deliver(asked, AsgiSink(client.send))
        assert client.headers[b"plait-engine"] == b"b"


async def test_a_usage_that_cannot_be_leaves_the_prediction() -> None:
    wrong = WHOLE.replace(b'"completion_tokens":9', b'"completion_tokens":1e14')
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[wrong]))) as made:
        await made.deliver(Client())
        assert made.router.engines["a"].view.ledger.mean_output_tokens == 128
        found = samples(made.registry)
        assert found['plait_usage_corrected_total{engine="a",model="m"}'] == 1
        assert found['plait_output_tokens_total{engine="a",model="m"}'] == 2**24
