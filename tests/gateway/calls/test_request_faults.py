"""A 5xx that a second engine gives for the same call is the request's fault; any other is the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from plait.backends.errors import EngineError
from plait.gateway.asgi import ClientGoneError
from plait.gateway.calls import attempts
from plait.gateway.fleet.health import HealthState
from tests.gateway.calls.scripted_engines import (
    BODY,
    DONE,
    FINISH,
    JSON,
    USAGE_EVENT,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    Gateway,
    gateway,
    until_stuck,
)
from tests.invariants import check_retries

OTHER = b'{"model": "m", "prompt": "y"}'


def well() -> Exchange:
    return Exchange(headers=JSON, pieces=[WHOLE])


def poisoned(said: str = "cannot read the picture", status: int = 500) -> Exchange:
    return Exchange(status, JSON, [f'{{"error":{{"message":"{said}"}}}}'.encode()])


def garbled() -> Exchange:
    return Exchange(headers=JSON, pieces=[b"<html>"])


def garbled_stream() -> Exchange:
    return Exchange(headers=JSON, pieces=[b'data: {"choices": 1}\n\n'])


def abandoned() -> Exchange:
    return Exchange(headers=JSON, pieces=[b'{"choices":[{"finish_reason":"abort"}]}'])


def empty() -> Exchange:
    return Exchange(pieces=[b""])


def broken() -> Exchange:
    return Exchange(pieces=[b'data: {"choices":[{"index":0,"text":"x"}]}\n\n', DONE])


def stream() -> Exchange:
    return Exchange(pieces=[FINISH, USAGE_EVENT, DONE])


def body_of(number: int) -> bytes:
    return b'{"model": "m", "prompt": "%d"}' % number


async def serve(made: Gateway, calls: int = 3) -> None:
    """Each engine answers a call, so that it serves others."""
    for _ in range(calls):
        await made.deliver(Client())


def states(made: Gateway) -> list[HealthState]:
    return [engine.health.state for engine in made.router.engines.values()]


def asked(made: Gateway) -> list[int]:
    return [len(http.requests) for http in made.engines.values()]


async def test_a_request_that_two_engines_fail_alike_is_at_fault() -> None:
    engines = [FakeHttp(well(), poisoned(f"cannot read picture 0x{n}fa")) for n in range(3)]
    async with gateway(*engines) as made:
        await serve(made)
        client = Client()
        await made.deliver(client, body=OTHER)
        assert (client.status, client.headers[b"x-should-retry"]) == (500, b"false")
        assert b"cannot read picture" in client.body
        assert sum(asked(made)) == 3 + 2, "no third engine is asked"
        assert states(made) == [HealthState.UP] * 3
        assert made.outcomes()["b", "refused"] == 1
        assert [engine.doubts for engine in made.router.engines.values()] == [0, 0, 0]


async def test_the_same_body_is_then_asked_of_one_engine_only() -> None:
    engines = [FakeHttp(well(), *[poisoned() for _ in range(9)]) for _ in range(3)]
    async with gateway(*engines) as made:
        await serve(made)
        for _ in range(5):
            await made.deliver(Client(), body=OTHER)
        assert sum(asked(made)) == 3 + 2 + 4
        assert made.metrics.of_tenants()[1] == {"": 5}, "the tenant's requests break engines"
        assert states(made) == [HealthState.UP] * 3


async def test_an_engine_whose_call_another_one_answers_was_at_fault() -> None:
    engines = [FakeHttp(well(), *[poisoned() for _ in range(3)]), FakeHttp(*[well() for _ in range(9)])]
    async with gateway(*engines) as made:
        await serve(made, 2)
        for body in (OTHER, BODY, OTHER, BODY):
            await made.deliver(Client(), body=body)
        assert made.router.engines["a"].health.state in (HealthState.SUSPECT, HealthState.EJECTED)
        assert made.router.engines["a"].doubts == 0


async def test_a_stream_that_begins_elsewhere_shows_whose_fault_it_was() -> None:
    stream = Exchange(pieces=[FINISH, USAGE_EVENT, DONE])
    async with gateway(FakeHttp(well(), poisoned()), FakeHttp(well(), stream)) as made:
        await serve(made, 2)
        await made.deliver(Client(), body=OTHER)
        assert states(made) == [HealthState.SUSPECT, HealthState.UP]


async def test_engines_that_serve_nobody_else_are_judged_as_ever() -> None:
    async with gateway(*[FakeHttp(poisoned()) for _ in range(3)]) as made:
        with pytest.raises(EngineError):
            await made.deliver(Client())
        assert asked(made) == [1, 1, 1]
        assert states(made) == [HealthState.SUSPECT] * 3


async def test_an_engine_that_has_failed_others_calls_is_judged_as_ever() -> None:
    engines = [
        FakeHttp(well(), poisoned(), poisoned()),
        FakeHttp(well(), well(), poisoned()),
        FakeHttp(well(), *[well() for _ in range(3)]),
    ]
    async with gateway(*engines) as made:
        await serve(made)
        await made.deliver(Client())  # a fails it, b answers
        assert made.router.engines["a"].health.state is HealthState.SUSPECT
        before = sum(asked(made))
        for body in (OTHER, BODY):
            client = Client()
            await made.deliver(client, body=body)
            assert client.status == 200
        assert sum(asked(made)) > before + 2


async def test_a_second_engine_that_has_failed_others_is_no_witness() -> None:
    engines = [FakeHttp(well(), poisoned()), FakeHttp(well(), poisoned()), FakeHttp(well(), well())]
    async with gateway(*engines) as made:
        await serve(made)
        made.router.engines["b"].health.failed("status_500", 0.0)
        client = Client()
        await made.deliver(client, body=OTHER)
        assert client.status == 200


async def test_a_client_that_goes_while_another_engine_is_asked_convicts_nobody() -> None:
    async with gateway(FakeHttp(well(), poisoned()), FakeHttp(well(), None)) as made:
        await serve(made, 2)
        client = Client()
        asking = asyncio.create_task(made.deliver(client, body=OTHER))
        await until_stuck()
        assert made.router.engines["a"].doubts == 1
        client.gone.set()
        with pytest.raises(ClientGoneError):
            await asking
        assert states(made) == [HealthState.UP] * 2
        assert made.router.engines["a"].doubts == 0


async def test_other_failures_are_no_doubts() -> None:
    async with gateway(FakeHttp(well(), EngineError("engine lost")), FakeHttp(well(), well())) as made:
        await serve(made, 2)
        await made.deliver(Client(), body=OTHER)
        assert states(made)[0] is HealthState.SUSPECT


@pytest.mark.parametrize("status", [503, 429])
async def test_engines_that_are_full_are_no_request_s_fault(status: int) -> None:
    engines = [FakeHttp(well(), poisoned("full", status), poisoned("full", status)) for _ in range(3)]
    async with gateway(*engines) as made:
        await serve(made)
        with pytest.raises(EngineError):
            await made.deliver(Client(), body=OTHER)
        assert sum(asked(made)) == 3 + 3


async def test_what_no_engine_can_do_is_the_callers_fault() -> None:
    async with gateway(FakeHttp(poisoned("not supported", 501)), FakeHttp()) as made:
        client = Client()
        await made.deliver(client)
        assert (client.status, client.headers[b"x-should-retry"]) == (501, b"false")
        assert states(made) == [HealthState.UP] * 2
        assert made.outcomes() == {("a", "refused"): 1}


async def test_streams_that_begin_with_the_same_error_are_passed_on() -> None:
    event = b'data: {"error":{"message":"cannot read","code":500}}\n\n'
    engines = [FakeHttp(well(), Exchange(pieces=[event, DONE])) for _ in range(3)]
    async with gateway(*engines) as made:
        await serve(made)
        client = Client()
        await made.deliver(client, body=OTHER)
        assert (client.status, client.body) == (200, event + DONE)
        assert states(made) == [HealthState.UP] * 3
        assert made.outcomes()["b", "refused"] == 1


async def test_many_doubts_keep_new_calls_away_until_they_are_settled() -> None:
    sick = FakeHttp(well(), *[poisoned() for _ in range(3)])
    well_one = FakeHttp(well(), None, None, None, *[well() for _ in range(4)])
    async with gateway(sick, well_one) as made:
        await serve(made, 2)
        engine = made.router.engines["a"]
        for doubts in range(3):
            assert len(made.router.models.takers["m"]) == 2, doubts
            made.router.health.doubt(engine)
        assert [view.engine_id for view in made.router.models.takers["m"]] == ["b"]
        for _ in range(3):
            made.router.health.no_doubt(engine)
        assert len(made.router.models.takers["m"]) == 2


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "REPEAT_S", 0.001)


@pytest.mark.usefixtures("_at_once")
async def test_a_body_that_the_only_engine_fails_three_times_beside_others_is_at_fault() -> None:
    async with gateway(FakeHttp(well(), *[poisoned() for _ in range(3)], garbled(), garbled(), garbled())) as made:
        await serve(made, 1)
        client = Client()
        await made.deliver(client, body=OTHER)
        assert (client.status, client.headers[b"x-should-retry"]) == (500, b"false")
        with pytest.raises(EngineError):
            await made.deliver(Client())
        assert states(made) == [HealthState.UP]
        assert made.router.engines["a"].doubts == 0


@pytest.mark.usefixtures("_at_once")
async def test_an_engine_that_answers_nobody_for_a_time_is_at_fault() -> None:
    async with gateway(FakeHttp(well(), *[garbled() for _ in range(6)])) as made:
        await serve(made, 1)
        made.router.engines["a"].health.succeeded_s -= 60.0
        for body in (OTHER, BODY):
            with pytest.raises(EngineError):
                await made.deliver(Client(), body=body)
        assert states(made) == [HealthState.SUSPECT]


@pytest.mark.parametrize("bodies", [1, 9])
@pytest.mark.parametrize("bad", [garbled, garbled_stream, abandoned, empty])
async def test_what_two_engines_garble_alike_is_the_requests_fault(bad: Callable[[], Exchange], bodies: int) -> None:
    engines = [FakeHttp(well(), *[bad() for _ in range(9)], well()) for _ in range(2)]
    async with gateway(*engines) as made:
        await serve(made, 2)
        for number in range(9):
            with pytest.raises(EngineError):
                await made.deliver(Client(), body=body_of(number % bodies))
        assert states(made) == [HealthState.UP] * 2
        assert sum(asked(made)) == 2 + 9 + bodies
        assert [engine.doubts for engine in made.router.engines.values()] == [0, 0]
        check_retries(made.router.retries, 0)


async def test_what_another_engine_answers_was_the_engines_fault() -> None:
    sick, healthy = FakeHttp(well(), garbled(), garbled(), garbled()), FakeHttp(*[well() for _ in range(9)])
    async with gateway(sick, healthy) as made:
        await serve(made, 2)
        for number in range(6):
            await made.deliver(Client(), body=body_of(number))
        assert states(made) == [HealthState.EJECTED, HealthState.UP]
        assert asked(made) == [4, 7], "it is out after three failures"


async def test_a_body_that_breaks_streams_alike_is_at_fault_from_the_second_call_on() -> None:
    async with gateway(*[FakeHttp(well(), *[broken() for _ in range(4)]) for _ in range(2)]) as made:
        await serve(made, 2)
        for _ in range(8):
            client = Client()
            await made.deliver(client, body=OTHER)
            assert b"engine_broken" in client.body
        assert states(made) == [HealthState.UP] * 2


async def test_an_engine_that_breaks_everybodys_streams_goes_out() -> None:
    sick, healthy = FakeHttp(well(), *[broken() for _ in range(3)]), FakeHttp(*[stream() for _ in range(9)])
    async with gateway(sick, healthy) as made:
        made.router.engines["b"].served_s = 0.0
        await serve(made, 2)
        for number in range(6):
            await made.deliver(Client(), body=body_of(number))
        assert states(made) == [HealthState.EJECTED, HealthState.UP]
        assert asked(made) == [4, 4]


async def test_a_broken_stream_whose_body_another_engine_answers_later_was_the_engines_fault() -> None:
    async with gateway(FakeHttp(well(), broken()), FakeHttp(well(), stream())) as made:
        await serve(made, 2)
        await made.deliver(Client(), body=OTHER)
        assert states(made) == [HealthState.UP] * 2, "it is open whose fault it was"
        await made.deliver(Client(), body=OTHER)
        assert states(made) == [HealthState.SUSPECT, HealthState.UP]


async def test_a_body_that_was_at_fault_is_still_tried_again_after_a_lost_connection() -> None:
    engines = [
        FakeHttp(well(), garbled(), EngineError("engine lost")),
        FakeHttp(well(), garbled(), well()),
    ]
    async with gateway(*engines) as made:
        await serve(made, 2)
        with pytest.raises(EngineError):
            await made.deliver(Client(), body=OTHER)
        client = Client()
        await made.deliver(client, body=OTHER)
        assert client.status == 200


async def test_an_engine_that_wants_another_key_is_no_requests_fault() -> None:
    refused = b'{"error":"Unauthorized: sk-secret"}'
    async with gateway(*[FakeHttp(well(), Exchange(401, JSON, [refused])) for _ in range(2)]) as made:
        await serve(made, 2)
        with pytest.raises(EngineError, match="wants another API key") as caught:
            await made.deliver(Client(), body=OTHER)
        assert caught.value.status == 502
        assert "sk-secret" not in caught.value.message
        assert states(made) == [HealthState.SUSPECT] * 2
