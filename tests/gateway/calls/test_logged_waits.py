"""What the log says of the waits of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, MutableMapping
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from plait.backends.errors import LimitError
from plait.gateway.asgi import ClientGoneError
from plait.gateway.calls.call import Asked
from plait.gateway.timer import loop_time_s
from tests.gateway.calls.scripted_engines import Client, FakeHttp, Gateway, gateway, until_stuck
from tests.gateway.calls.test_gate import close_gate, leased, open_gate, whole
from tests.gateway.exposed import samples

WAIT_S = 0.05


def waited_for(logs: Iterable[MutableMapping[str, Any]]) -> list[dict[str, float] | None]:
    return [line["waited_for"] for line in logs if line["event"] == "call"]


async def test_a_call_that_has_not_waited() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(whole())) as made:
            await made.deliver_whole(Client())
    assert waited_for(logs) == [None]


async def test_calls_that_wait_for_a_slot_and_for_their_turn() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(whole(), whole())) as made:
            close_gate(made)
            calls = [asyncio.create_task(made.deliver_whole(Client())) for _ in range(2)]
            backlogs = made.gate.admission.queue.backlogs
            while sum(line.length for line in backlogs.values()) < len(calls):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)
            await asyncio.sleep(WAIT_S)
            open_gate(made)
            await asyncio.gather(*calls)
    first, second = waited_for(logs)
    assert first is not None
    assert second is not None
    assert (list(first), list(second)) == (["slot"], ["turn"])
    waited_s = [line["waited_s"] for line in logs if line["event"] == "call"]
    assert [first["slot"], second["turn"]] == pytest.approx(waited_s, abs=WAIT_S / 2)


async def test_a_call_whose_client_goes_while_it_waits() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp()) as made:
            close_gate(made)
            client = Client()
            call = asyncio.create_task(made.deliver(client))
            await asyncio.sleep(WAIT_S)
            client.gone.set()
            with pytest.raises(ClientGoneError):
                await call
    (found,) = waited_for(logs)
    assert found is not None
    assert found["slot"] >= WAIT_S / 2


async def test_a_call_that_is_told_to_come_back() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp()) as made:
            close_gate(made)
            made.gate._hold_s = WAIT_S
            with pytest.raises(LimitError):
                await made.deliver_whole(Client())
    (found,) = waited_for(logs)
    assert found is not None
    assert found["slot"] >= WAIT_S / 2


async def test_a_call_for_which_the_store_is_asked() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(whole())) as made:
            held = asyncio.Event()
            leased(made, held)
            call = asyncio.create_task(made.deliver_whole(Client()))
            await asyncio.sleep(WAIT_S)
            held.set()
            await call
    (found,) = waited_for(logs)
    assert found is not None
    assert list(found) == ["store"]
    assert found["store"] >= WAIT_S / 2


async def late_by(made: Gateway, seconds: float) -> None:
    """The loop goes on after it stood still for so long."""
    lag, now_s = made.router.health.lag, loop_time_s()
    lag.ran(now_s, now_s)
    lag.ran(now_s + seconds, inf)
    await asyncio.sleep(0)


async def test_a_call_whose_gateway_stood_still_while_its_engine_had_it() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(None)) as made:
            client = Client()
            call = asyncio.create_task(made.deliver(client))
            await until_stuck()
            await late_by(made, 5.0)
            client.gone.set()
            with pytest.raises(ClientGoneError):
                await call
        assert made.ending.gateway_s == pytest.approx(5.0, abs=0.1)
        waited = samples(made.registry)
    (found,) = waited_for(logs)
    assert found is not None
    assert list(found) == ["gateway"]
    assert found["gateway"] == pytest.approx(5.0, abs=0.1)
    assert waited['plait_waited_seconds_count{model="m",why="gateway"}'] == 1


async def test_a_call_that_stood_in_the_gateway_before_it_was_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text was tokenized, or other calls had the event loop: nothing names what it waited for."""
    with capture_logs() as logs:
        async with gateway(FakeHttp(whole(), whole())) as made:
            asked = made.asked

            def came_before(**fields: Any) -> Asked:
                found = asked(**fields)
                return replace(found, call=found.call._replace(arrived_s=found.call.arrived_s - 3.0))

            monkeypatch.setattr(made, "asked", came_before)
            await made.deliver_whole(Client())
            close_gate(made)
            call = asyncio.create_task(made.deliver_whole(Client()))
            await asyncio.sleep(WAIT_S)
            open_gate(made)
            await call
    at_once, after_a_wait = waited_for(logs)
    assert at_once is not None
    assert after_a_wait is not None
    assert list(at_once) == ["gateway"]
    assert at_once["gateway"] == pytest.approx(3.0, abs=0.1)
    assert after_a_wait["gateway"] == pytest.approx(3.0, abs=0.1)
    assert after_a_wait["slot"] >= WAIT_S / 2, "what a wait explains is no time of the gateway"


async def test_a_lag_before_a_call_and_a_short_one_are_not_its_waits() -> None:
    with capture_logs() as logs:
        async with gateway(FakeHttp(whole(), whole())) as made:
            made.router.health.lag.ran(loop_time_s() - 5.0, loop_time_s() - 5.0)
            made.router.health.lag.ran(loop_time_s() - 1.0, inf)
            await made.deliver_whole(Client())
            await late_by(made, 0.2)
            await made.deliver_whole(Client())
    assert waited_for(logs) == [None, None]
