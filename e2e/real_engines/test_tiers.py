"""Engines that have moved a name of the adapter's: one that only reports, and one without chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from e2e.real_engines.calls import send_at_once, send_singly, workload
from e2e.real_engines.engine import KV_TOKENS, EngineKind, RealEngine
from e2e.real_engines.environment import ROOT
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.real_engines.greedy import greedy_outputs
from e2e.real_engines.reference import Reference

pytestmark = pytest.mark.nightly

MOVED: Final = {
    "vllm": {
        "reports": "vllm.v1.core.block_pool:BlockHashToBlockMap.get_one_block:key",
        "order": "vllm.v1.core.sched.scheduler:Scheduler._preempt_request:request",
    },
    "sglang": {
        "reports": "sglang.srt.managers.scheduler:Scheduler.get_new_batch_prefill:running_batch",
        "order": "sglang.srt.managers.schedule_policy:PrefillAdder.ceil_paged_tokens:tokens",
    },
}
"""Per kind of engine, the tier and a name without which it is the highest."""
CALLS: Final = 150
SET_TOKENS: Final = 3 * KV_TOKENS // 2
"""1.5 times what one engine holds: it keeps evicting. Both engines together hold it."""


@pytest.fixture(scope="module")
def lower(kind: EngineKind, reference: Reference, python: Path, model: Path, folder: Path) -> Iterator[EngineFleet]:
    """Two engines, each named by its tier, and a gateway; only once the engines of `reference` have stopped."""
    assert reference.stock
    engines: dict[str, RealEngine] = {}
    for tier, moved in MOVED[kind.name].items():
        engines[tier] = kind.plait(tier, python, model, folder)
        engines[tier].set_variable("PYTHONPATH", str(ROOT / "e2e" / "moved_names"))
        engines[tier].set_variable("PLAIT_TEST_MOVED", moved)
    fleet = EngineFleet(new_gateway("gateway-tiers", engines, model, folder), engines)
    with ExitStack() as stack:
        fleet.start(stack)
        yield fleet


def test_the_start_and_the_report_say_so(lower: EngineFleet, kind: EngineKind) -> None:
    for tier, engine in lower.engines.items():
        scheduler = engine.cache_state().scheduler
        assert (scheduler.tier, scheduler.policy) == (tier, {"reports": "engine", "order": "slo"}[tier])
        (line,) = [line for line in engine.log().splitlines() if f"is '{tier}'; it lacks: " in line]
        assert MOVED[kind.name][tier].split(":")[1] in line


@pytest.mark.parametrize("tier", ["reports", "order"])
def test_an_engine_says_what_a_stock_one_says(lower: EngineFleet, reference: Reference, tier: str) -> None:
    assert greedy_outputs(lower.engines[tier]) == reference.stock


def test_calls_find_what_was_predicted(lower: EngineFleet, kind: EngineKind, findings: Findings) -> None:
    lower.settle()
    calls = workload(None, 2 * SET_TOKENS, CALLS, seed=6, sizes=kind.documents)
    answers = send_singly(lower.gateway, calls, before_each=lower.settle)
    for tier in lower.engines:
        of_tier = [answer.was_predicted for answer in answers if answer.engine == tier]
        assert len(of_tier) > CALLS / 10
        assert findings.at_least(f"share predicted in the tier {tier}", sum(of_tier) / len(of_tier), 0.97)


def test_calls_at_concurrency_8_find_what_was_predicted(
    lower: EngineFleet, kind: EngineKind, findings: Findings
) -> None:
    lower.evict_all()
    lower.settle()
    answers = send_at_once(lower.gateway, workload(None, SET_TOKENS, CALLS, seed=7, sizes=kind.documents), 8)
    predicted = [answer.was_predicted for answer in answers]
    assert findings.at_least("share predicted in lower tiers at concurrency 8", sum(predicted) / len(predicted), 0.95)
