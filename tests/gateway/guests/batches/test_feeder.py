"""The feeder sends no more lines than there is room for, also while they are on their way to an engine."""

from __future__ import annotations

import asyncio
from math import inf

from plait.gateway.admission.admission import Admission
from plait.gateway.admission.tenants import UNLIMITED
from plait.gateway.fleet.router import Router
from plait.gateway.guests.batches.feeder import Feeder, SentLine
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear

COSTS = CostModel(PiecewiseLinear(((0, 0.01),), 1e-4), 0.0, 0.0, 0.0, LongAttention())
SLOTS = 8


def fleet(*engines: str) -> tuple[Router, Feeder]:
    router = Router("plait", gateway_id="own")
    for name in engines:
        router.add_engine(name, COSTS)
        router.health.answered(name, {"m": None})
        router.engines[name].view.use_report(slots=SLOTS, urgent_first=True)
    return router, Feeder(router, Admission(router, lambda _when_s, _event: None, lambda _: UNLIMITED, max_wait_s=inf))


def sent(feeder: Feeder) -> list[SentLine]:
    """All lines that may be sent now. None of them reaches its engine."""
    lines = list[SentLine]()
    while (engine := feeder.engine_for("m", lambda _engine: 10.0, 0.0)) is not None:
        lines.append(feeder.sent(engine, 10.0, 0.0))
        assert len(lines) <= 10 * SLOTS
    return lines


def test_lines_on_their_way_take_room() -> None:
    _, feeder = fleet("one", "two")
    lines = sent(feeder)
    assert sorted(line.engine for line in lines) == ["one"] * (SLOTS - 1) + ["two"] * (SLOTS - 1)
    feeder.ended(next(line for line in lines if line.engine == "two"))
    assert [line.engine for line in sent(feeder)] == ["two"]


def test_lines_of_another_gateway_take_room_once() -> None:
    """Lines that it has sent are none of those that are on their way from here."""
    router, feeder = fleet("one")
    for _ in range(3):
        router.engines["one"].view.begin_reported(100.0, None, 0.0, is_line=True)
    assert len(sent(feeder)) == SLOTS - 1 - 3


def test_an_engine_without_a_line_that_is_left_gets_none() -> None:
    _, feeder = fleet("one", "two")
    assert feeder.engine_for("m", lambda engine: 10.0 if engine == "two" else None, 0.0) == "two"
    assert feeder.engine_for("other", lambda _engine: 10.0, 0.0) is None


async def test_an_engine_is_kept_for_all_that_run_alone() -> None:
    _, feeder = fleet("one", "two")
    lines = sent(feeder)
    order = list[str | None]()

    async def run_alone() -> None:
        async with feeder.alone("m", "one", lambda: False) as engine:
            order.append(engine)
            assert "two" not in [line.engine for line in sent(feeder)]

    tasks = [asyncio.create_task(run_alone()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not order, "lines run on both engines"
    for line in lines:
        feeder.ended(line)
    await asyncio.gather(*tasks)
    assert order == ["two"] * 3
    assert [line.engine for line in sent(feeder)] == ["two"] * (SLOTS - 1)


async def test_a_line_does_not_wait_to_run_alone_once_its_batch_is_over() -> None:
    _, feeder = fleet("one")
    sent(feeder)
    is_over = False
    async with feeder.alone("other", "", lambda: True) as engine:
        assert engine is None

    async def run_alone() -> str | None:
        async with feeder.alone("m", "", lambda: is_over) as engine:
            return engine

    waits = asyncio.create_task(run_alone())
    await asyncio.sleep(0)
    is_over = True
    feeder.wake()
    assert await waits is None
