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
    until_s = time.process_time() + work_s
    while work_s and time.process_time() < until_s:
        pass


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


async def test_passes_in_which_others_have_the_cpu_are_not_long() -> None:
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "a", log)) for _ in range(MOST * 3)]
    passes = []
    while len(log) < MOST * 3:
        before = len(log)
        await asyncio.sleep(0)
        time.sleep(2 * loop_turns.LONG_PASS_S)  # noqa: ASYNC251 - the loop does not run meanwhile
        passes.append(len(log) - before)
    await asyncio.gather(*burst)
    assert len(passes) <= 5


async def _burst(turns: LoopTurns, requests: int, work_s: float, tenant: str = "a") -> tuple[int, list[LimitError]]:
    """How many of so many requests at once begin, and the errors of the others."""
    log = list[str]()
    ended = await asyncio.gather(
        *(_request(turns, tenant, log, work_s) for _ in range(requests)), return_exceptions=True
    )
    return len(log), [error for error in ended if isinstance(error, LimitError)]


async def test_a_burst_waits_and_a_standing_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_turns, "MOST_WAIT_S", 0.01)
    monkeypatch.setattr(loop_turns, "LONG_PASS_S", 0.01)
    turns = LoopTurns()
    await turns.begin("a")
    monkeypatch.setattr(loop_turns, "STANDING_S", 1.0)
    await asyncio.sleep(1.1)
    assert await _burst(turns, MOST * 3, 0.001) == (MOST * 3, []), "nobody waited meanwhile"
    monkeypatch.setattr(loop_turns, "STANDING_S", 0.05)
    begun, refused = await _burst(LoopTurns(), MOST * 3, 0.01)
    assert begun + len(refused) == MOST * 3
    assert refused
    assert {(error.status, error.code) for error in refused} == {(429, "gateway_busy")}


@pytest.mark.parametrize(("others", "begun"), [((), MOST - 1 + 30), (("b",), MOST - 1 + 10)])
async def test_what_waits_is_bounded_and_more_so_beside_others(
    monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...], begun: int
) -> None:
    monkeypatch.setattr(loop_turns, "MOST_WAITING", 30)
    monkeypatch.setattr(loop_turns, "MOST_SHARED", 10)
    turns = LoopTurns()
    for other in others:
        await turns.begin(other)
        await asyncio.sleep(0)
    found, refused = await _burst(turns, 200, 0.0)
    assert (found, len(refused)) == (begun, 200 - begun)
    assert await _burst(turns, 1, 0.0, "c") == (1, [])


async def test_a_request_whose_client_goes_gives_its_turn_up() -> None:
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "a", log)) for _ in range(MOST + 1)]
    await asyncio.sleep(0)
    burst[-1].cancel()
    await asyncio.gather(*burst, return_exceptions=True)
    assert len(log) == MOST
    assert repr(turns).startswith("LoopTurns(Turns(waiting={}")
