"""The embedded engine in real time, a thousand times as fast: when it runs, who is told, when a report is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from plait.lab.embedded.call import EmbeddedCall, Output
from plait.lab.embedded.clock import EngineClock
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.prefix.block_hash import root_hash

COSTS = CostModel(PiecewiseLinear(((1, 0.5),), 0.0), 0.0, 0.0, 0.0, LongAttention())
FOREVER_S = 100.0


def new_engine() -> Engine:
    return Engine(EngineSettings(name="e", model="m", kv_tokens=1_024), COSTS, epoch="now")


@pytest.fixture
def engine() -> Engine:
    return new_engine()


@pytest.fixture
async def clock(engine: Engine) -> AsyncIterator[EngineClock]:
    clock = EngineClock([engine], time_scale=1_000.0)
    yield clock
    await clock.close()


def new_call(clock: EngineClock, tokens: int = 64, output: int = 3) -> EmbeddedCall:
    chain, tree_chain = (HashChain(size, root_hash("m"), range(tokens)) for size in (16, 64))
    return EmbeddedCall(
        *("c", clock.now_s(), tokens),
        chain=chain,
        tree_chain=tree_chain,
        max_output_tokens=output,
        final_output_tokens=output,
    )


async def run(clock: EngineClock, engine: Engine, call: EmbeddedCall) -> list[Output]:
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    clock.add(engine, call, outputs.put_nowait)
    received = [await outputs.get()]
    while not received[-1].finished:
        received.append(await outputs.get())
    return received


async def test_each_token_comes_after_its_iteration(clock: EngineClock, engine: Engine) -> None:
    began_s = clock.now_s()
    outputs = await run(clock, engine, new_call(clock))
    assert [output.finished for output in outputs] == [False, False, True]
    assert clock.now_s() - began_s >= 3 * 0.5
    assert engine.counters.busy_s == 1.5


async def test_it_sleeps_while_idle_and_wakes_for_the_next_call(clock: EngineClock, engine: Engine) -> None:
    for _ in range(3):
        assert len(await run(clock, engine, new_call(clock))) == 3
        await asyncio.sleep(0.001)
        assert engine.idle
    assert engine.counters.iterations == 9


async def test_calls_that_wait_together_are_batched(clock: EngineClock, engine: Engine) -> None:
    await asyncio.gather(*(run(clock, engine, new_call(clock)) for _ in range(5)))
    assert engine.counters.iterations == 3


async def test_an_aborted_call_is_told_nothing_more(clock: EngineClock, engine: Engine) -> None:
    heard: list[Output] = []
    call = new_call(clock, output=1_000)
    clock.add(engine, call, heard.append)
    await run(clock, engine, new_call(clock))
    clock.abort(engine, call)
    count = len(heard)
    clock.abort(engine, call)
    clock.end(engine, call)
    await run(clock, engine, new_call(clock))
    assert 0 < count == len(heard)
    assert engine.counters.aborted_calls == 1
    assert engine.running == []


async def test_ending_a_call_early_is_no_abort(clock: EngineClock, engine: Engine) -> None:
    call = new_call(clock, output=1_000)
    clock.add(engine, call, lambda _: clock.end(engine, call))
    await run(clock, engine, new_call(clock))
    assert call.sent_tokens == 1
    assert engine.counters.aborted_calls == 0


async def test_a_report_waits_for_a_change(clock: EngineClock, engine: Engine) -> None:
    waiting = asyncio.create_task(clock.cache_state(engine, 0, "now", FOREVER_S))
    await asyncio.sleep(0.002)
    assert not waiting.done()
    await run(clock, engine, new_call(clock))
    state = await waiting
    assert (state.cursor, len(state.stored), state.snapshot) == (1, 1, False)


async def test_calls_are_news_for_other_gateways(clock: EngineClock, engine: Engine) -> None:
    """Not for the gateway that has sent them: it knows them."""
    waiting = asyncio.create_task(clock.cache_state(engine, 0, "now", FOREVER_S, "other"))
    await asyncio.sleep(0.002)
    call = new_call(clock, tokens=32, output=1_000)
    call.gateway = "own"
    clock.add(engine, call, lambda _: None)
    assert not engine.has_news(0, "own")
    state = await waiting
    assert [one.gateway for one in state.calls or ()] == ["own"]
    clock.abort(engine, call)
    assert (await clock.cache_state(engine, state.cursor, "now", FOREVER_S, "other")).ended == [1]


async def test_a_report_waits_no_longer_than_asked(clock: EngineClock, engine: Engine) -> None:
    state = await clock.cache_state(engine, 0, "now", 0.002)
    assert (state.cursor, state.stored, state.snapshot) == (0, [], False)


@pytest.mark.parametrize(("since", "epoch"), [(None, "now"), (None, None), (1, "before"), (0, None), (9, "now")])
async def test_a_report_with_news_does_not_wait(
    clock: EngineClock, engine: Engine, since: int | None, epoch: str | None
) -> None:
    """A first request, one of another epoch, one behind, one from the future."""
    await run(clock, engine, new_call(clock))
    state = await clock.cache_state(engine, since, epoch, FOREVER_S)
    assert [len(run.hashes) for run in state.stored] == [1]
    assert state.snapshot == (since != 0)


async def test_time_does_not_stand_still(engine: Engine) -> None:
    with pytest.raises(ValueError, match="above 0, not 0"):
        EngineClock([engine], time_scale=0)
