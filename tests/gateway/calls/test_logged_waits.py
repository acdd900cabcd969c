"""What the log says of the waits of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from plait.backends.errors import LimitError
from plait.gateway.asgi import ClientGoneError
from tests.gateway.calls.scripted_engines import Client, FakeHttp, gateway
from tests.gateway.calls.test_gate import close_gate, leased, open_gate, whole

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
