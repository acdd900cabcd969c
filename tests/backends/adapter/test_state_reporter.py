"""A report has what the engine is, what changed in its cache, and what its queue and its iterations were like."""

from __future__ import annotations

from typing import Any

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.hit_ends import EngineEnds, Kind
from plait.backends.adapter.state_reporter import StateReporter
from plait.backends.protocol.cache_state import (
    CacheState,
    HitEnds,
    IterationState,
    KvState,
    QueueState,
    SchedulerState,
    StoredRun,
)
from plait.policy.scheduling.plan import LocalCall
from plait.policy.types import Slo

KV = KvState(10, 4, 3)


def new_reporter() -> StateReporter:
    return StateReporter(
        engine="e",
        kind="vllm",
        epoch="now",
        model="m",
        block_tokens=16,
        policy="slo",
        journal=CacheJournal(),
        slots=16,
    )


def reported(reporter: StateReporter, since: int | None = None, epoch: str | None = None, **more: Any) -> CacheState:
    now = {"kv": KV, "waiting_prompts": [30, 12], "running": 3, "budget_tokens": 512, "preemptions": 7, **more}
    return reporter.report(since, epoch, **now)


def test_a_report_says_all_there_is() -> None:
    reporter = new_reporter()
    reporter.journal.store(1, None)
    reporter.iterations.admitted(0.5)
    reporter.iterations.computes([64, 1])
    reporter.iterations.took(0.25)
    reporter.attainment.received("a", LocalCall("a", 0.0, 64, slo=Slo(ttft_s=1.0)))
    reporter.attainment.produced("a", 1, 0.5)
    reporter.attainment.ended("a", 0.5)
    assert reported(reporter) == CacheState(
        engine="e",
        kind="vllm",
        epoch="now",
        cursor=1,
        model="m",
        block_tokens=16,
        granularity_tokens=64,
        snapshot=True,
        stored=[StoredRun(None, [1])],
        removed=[],
        kv=KV,
        queue=QueueState(waiting=2, running=3, waiting_tokens=42, mean_queue_s=0.5),
        iteration=IterationState(mean_s=0.25, max_s=0.25, mean_chunk_tokens=64.0, budget_tokens=512),
        scheduler=SchedulerState("slo", 1.0, 7, slots=16),
        calls=[],
    )


def test_a_cursor_counts_in_its_own_epoch_only() -> None:
    reporter = new_reporter()
    reporter.journal.store(1, None)
    reporter.journal.store(2, 1)
    for epoch in (None, "now"):
        state = reported(reporter, 1, epoch)
        assert (state.snapshot, state.stored) == (False, [StoredRun(1, [2])])
    state = reported(reporter, 1, "before")
    assert (state.snapshot, state.stored) == (True, [StoredRun(None, [1, 2])])


def test_a_report_tells_where_hits_can_end() -> None:
    reporter, have = new_reporter(), {10: 3, 11: 3, 12: 3}
    assert reported(reporter).ends is None
    reporter.untold = "its size"
    ends = reporter.ends = EngineEnds[int](
        [Kind((0,), 64), Kind((1,), 64, 1)],
        lambda key: have.get(key, 0),
        reporter.journal.changes,
        key_tokens=64,
        align_tokens=64,
    )
    for block, parent in ((1, None), (2, 1), (3, 2)):
        reporter.journal.store(block, parent)
    ends.computed([10, 11, 12], 0, 192, 0, [1, 2, 3], ())
    state = reported(reporter)
    assert (state.ends, state.untold) == (HitEnds(64, 0, [(3, 3)]), "its size")
    assert not reporter.has_news(state.cursor, None, None)
    have[11] = 1
    ends.changed(11)
    assert reporter.has_news(state.cursor, None, None), "the windows alone have lost a block"
    del have[12]
    ends.changed(12)
    reporter.journal.remove(3)
    later = reported(reporter, state.cursor)
    assert later.ends == HitEnds(64, 0, closed=[2]), "what is removed has no end either"
    assert later.removed == [3]
