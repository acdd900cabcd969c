"""Requests begin in turns while the event loop is busy."""

from __future__ import annotations

import asyncio
import time

import pytest

from plait.backends.errors import LimitError
from plait.gateway.calls import loop_turns
from plait.gateway.calls.loop_turns import FEWEST, MOST, LoopTurns


@pytest.fixture
def _short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short bound for passes, so that a test needs little time."""
    monkeypatch.setattr(loop_turns, "LONG_PASS_S", 0.002)


async def _request(turns: LoopTurns, tenant: str, log: list[str], work_s: float = 0.0) -> None:
    await turns.begin(tenant)
    log.append(tenant)
    time.sleep(work_s)  # noqa: ASYNC251 - what holds the loop is the point


async def test_an_idle_loop_lets_a_request_begin_at_once() -> None:
    turns, log = LoopTurns(), list[str]()
    request = _request(turns, "a", log)
    with pytest.raises(StopIteration):
        request.send(None)
    assert log == ["a"]
    await asyncio.sleep(0)  # the pass
    assert repr(turns) == "LoopTurns(Turns(waiting={}, seated={}))"


@pytest.mark.usefixtures("_short_passes")
async def test_one_tenants_burst_leaves_a_turn_to_another_in_each_pass() -> None:
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "many", log, 0.001)) for _ in range(MOST + 100)]
    await asyncio.sleep(0)
    await _request(turns, "one", log)
    assert len(log) <= MOST + 1
    await asyncio.gather(*burst)
    assert log.count("many") == MOST + 100


@pytest.mark.usefixtures("_short_passes")
async def test_long_passes_let_fewer_begin() -> None:
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "a", log, 0.003)) for _ in range(MOST * 2)]
    passes = []
    while len(log) < MOST * 2:
        before = len(log)
        await asyncio.sleep(0)
        passes.append(len(log) - before)
    await asyncio.gather(*burst)
    assert max(passes) == MOST - 1
    assert passes[-2] <= FEWEST


async def test_a_request_that_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_turns, "MOST_WAIT_S", 0.05)
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "a", log, 0.03)) for _ in range(MOST * 3)]
    ended = await asyncio.gather(*burst, return_exceptions=True)
    refused = [error for error in ended if isinstance(error, LimitError)]
    assert len(refused) + len(log) == MOST * 3
    assert refused
    assert {(error.status, error.code) for error in refused} == {(429, "gateway_busy")}


async def test_a_request_whose_client_goes_gives_its_turn_up() -> None:
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "a", log)) for _ in range(MOST + 1)]
    await asyncio.sleep(0)
    burst[-1].cancel()
    await asyncio.gather(*burst, return_exceptions=True)
    assert len(log) == MOST
    assert repr(turns).startswith("LoopTurns(Turns(waiting={}")
