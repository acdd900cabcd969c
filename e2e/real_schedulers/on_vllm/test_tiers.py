"""The adapter in a vLLM that has moved a name: the queue's order without chunks, or reports alone. The outputs stay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.scheduler import Scheduler

from e2e.real_schedulers.following import follow_a_workload
from e2e.real_schedulers.on_vllm.fixtures import Build
from e2e.real_schedulers.plans import Chaos
from e2e.real_schedulers.workloads import answers_so_far, one_a_step, shared_prefixes
from plait.backends.adapter.required_names import UnsupportedEngineError
from plait.policy.scheduling.local_scheduler import SCHEDULERS

MOVED = {"order": "Scheduler._preempt_request(request, timestamp)", "reports": "BlockHashToBlockMap.get_one_block(key)"}
"""The tier -> a name whose parameter is called otherwise, so that vLLM itself goes on as before."""


def move(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preempt: Callable[..., Any] = Scheduler._preempt_request
    get: Callable[..., Any] = BlockHashToBlockMap.get_one_block

    def _preempt_request(self: Scheduler, req: Any, *args: Any, **kwargs: Any) -> Any:
        return preempt(self, req, *args, **kwargs)

    def get_one_block(self: BlockHashToBlockMap, block_key: Any) -> Any:
        return get(self, block_key)

    if tier == "order":
        monkeypatch.setattr(Scheduler, "_preempt_request", _preempt_request)
    else:
        monkeypatch.setattr(BlockHashToBlockMap, "get_one_block", get_one_block)


@pytest.fixture(params=MOVED)
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The highest tier that vLLM allows now."""
    move(request.param, monkeypatch)
    return str(request.param)


class Lines(logging.Handler):
    """Keeps messages. vLLM's logger does not propagate, and versions of pytest differ in what they do about that."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """The adapter's lines in the log."""
    logger, handler = logging.getLogger("vllm.plait"), Lines()
    caplog.set_level(logging.WARNING, logger.name)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_the_start_and_the_report_say_so(build: Build, tier: str, lines: Lines) -> None:
    engine = build()
    (line,) = lines.texts
    assert f"is {tier!r}; it lacks: " in line
    assert line.endswith(MOVED[tier])
    scheduler = engine.report(None, None).scheduler
    assert (scheduler.tier, scheduler.policy) == (tier, "slo" if tier == "order" else "engine")


def test_the_start_fails_below_the_tier_that_is_asked_for(build: Build, tier: str) -> None:
    asked = {"require": "chunks"} if tier == "order" else {"scheduler": "fcfs"}
    with pytest.raises(UnsupportedEngineError) as refusal:
        build(plait=asked)
    assert f"it lacks: vllm.v1.core.{'sched.scheduler' if tier == 'order' else 'block_pool'}" in str(refusal.value)


@pytest.mark.parametrize("seed", range(2))
def test_reports_equal_the_cache(build: Build, tier: str, seed: int) -> None:
    engine = build()
    assert engine.report(None, None).scheduler.tier == tier
    follow_a_workload(engine, seed)


@pytest.mark.parametrize("blocks", [400, 80], ids=["roomy", "tight"])
def test_an_engine_that_only_reports_schedules_as_stock_vllm(
    build: Build, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    move("reports", monkeypatch)
    stock, reporting = build(plait=None, blocks=blocks), build(blocks=blocks)
    expected, steps = (
        shared_prefixes(engine, 1, most=500, arrivals=(0, 0, 1, 2, 5), aborted=0.1) for engine in (stock, reporting)
    )
    assert steps == expected
    assert reporting.tokens == stock.tokens


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_without_chunks_breaks_an_engine(build: Build, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    move("order", monkeypatch)
    engine = build(Chaos(seed), blocks=80)
    answers = one_a_step(engine, seed)
    assert engine.tokens == answers
    assert engine.pool.get_num_free_blocks() == 80 - 1


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_every_policy_ends_every_call_without_chunks(
    build: Build, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move("order", monkeypatch)
    engine = build(plait={"scheduler": policy}, blocks=80)
    shared_prefixes(engine, 0, most=500, arrivals=(0, 0, 1, 2, 5), aborted=0.1)
    assert engine.tokens == answers_so_far(engine)
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running


def test_cached_calls_go_first_without_chunks(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    move("order", monkeypatch)
    engine = build(plait={"scheduler": "hit_ratio"}, max_batch_tokens=64)
    shared = [position % 1000 for position in range(480)]
    engine.add(shared, 1)
    engine.run()
    for number in range(3):
        engine.add([500 + number * 100 + position for position in range(100)], name=f"cold-{number}")
        engine.add([*shared, number], name=f"warm-{number}")
    assert engine.step() == {"warm-0": 1, "warm-1": 1, "warm-2": 1, "cold-0": 61}
