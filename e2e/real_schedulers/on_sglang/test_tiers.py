"""The plugin in a SGLang that has moved a name: order without chunks, or reports alone. The outputs stay."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, PrefillAdder

from e2e.real_schedulers.built_engine import Build
from e2e.real_schedulers.following import follow_a_workload
from e2e.real_schedulers.plans import Chaos
from e2e.real_schedulers.workloads import answers_so_far, one_a_step, shared_prefixes
from plait.backends.adapter.required_names import UnsupportedEngineError
from plait.backends.sglang import compatibility
from plait.policy.scheduling.local_scheduler import SCHEDULERS

MOVED = {"order": "PrefillAdder.ceil_paged_tokens(tokens)", "reports": "CacheAgnosticPolicy.FIRST"}
"""The tier -> a name that SGLang does not have, although SGLang itself goes on as before."""


def move(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ceil: Callable[..., int] = PrefillAdder.ceil_paged_tokens

    def ceil_paged_tokens(self: PrefillAdder, count: int) -> int:
        return ceil(self, count)

    if tier == "order":
        monkeypatch.setattr(PrefillAdder, "ceil_paged_tokens", ceil_paged_tokens)
    else:
        assert not hasattr(CacheAgnosticPolicy, "FIRST")
        name = "sglang.srt.managers.schedule_policy.CacheAgnosticPolicy.FIRST"
        monkeypatch.setitem(compatibility.REQUIRED.order.methods, name, ())


@pytest.fixture(params=MOVED)
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The highest tier that SGLang allows now."""
    move(request.param, monkeypatch)
    return str(request.param)


def test_the_start_and_the_report_say_so(build: Build, tier: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.plait"):
        engine = build()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "vllm.plait"]
    assert f"is {tier!r}; it lacks: " in line
    assert line.endswith(MOVED[tier])
    scheduler = engine.report(None, None).scheduler
    assert (scheduler.tier, scheduler.policy) == (tier, "slo" if tier == "order" else "engine")


def test_the_start_fails_below_the_tier_that_is_asked_for(build: Build, tier: str) -> None:
    asked = {"require": "chunks"} if tier == "order" else {"scheduler": "fcfs"}
    with pytest.raises(UnsupportedEngineError) as refusal:
        build(plait=asked)
    assert MOVED[tier] in str(refusal.value)


@pytest.mark.parametrize("seed", range(2))
def test_reports_equal_the_cache(build: Build, tier: str, seed: int) -> None:
    engine = build()
    assert engine.report(None, None).scheduler.tier == tier
    follow_a_workload(engine, seed)


def test_an_engine_that_only_reports_schedules_as_stock_sglang(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    move("reports", monkeypatch)
    stock = build(plait=None)
    expected = shared_prefixes(stock, 1, most=500, arrivals=(0, 0, 1, 2, 5))
    tokens = stock.tokens
    reporting = build()
    assert shared_prefixes(reporting, 1, most=500, arrivals=(0, 0, 1, 2, 5)) == expected
    assert reporting.tokens == tokens


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_without_chunks_breaks_an_engine(build: Build, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    move("order", monkeypatch)
    engine = build(Chaos(seed))
    answers = one_a_step(engine, seed)
    assert engine.tokens == answers


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_every_policy_ends_every_call_without_chunks(
    build: Build, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move("order", monkeypatch)
    engine = build(plait={"scheduler": policy})
    shared_prefixes(engine, 0, most=500, arrivals=(0, 0, 1, 2, 5), aborted=0.1)
    assert engine.tokens == answers_so_far(engine)
    assert not engine.waiting
