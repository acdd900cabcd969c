"""What placement saves real engines: prompt tokens that they need not compute.

The comparison with round robin in the same run is for `make nightly`; virtual time makes it in each run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Final

import pytest

from e2e.real_engines.calls import Answer, send_at_once, workload
from e2e.real_engines.engine import KV_TOKENS, EngineKind
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from plait.lab.simulation.workload import WorkloadCall

NIGHTLY: Final = "PLAIT_NIGHTLY" in os.environ
CALLS: Final = 300
CONCURRENCY: Final = 8
WORKING_SET_TOKENS: Final = 3 * KV_TOKENS // 2
"""1.5 times what one engine holds, three quarters of what both do."""


@pytest.fixture(scope="module")
def calls(kind: EngineKind, traces: Path) -> list[WorkloadCall]:
    """Calls on the documents and tools of `traces`."""
    return workload(traces, WORKING_SET_TOKENS, CALLS, seed=1, sizes=kind.placed_documents)


def run(
    fleet: EngineFleet, policy: str, calls: Sequence[WorkloadCall], model: Path, folder: Path
) -> tuple[float, list[Answer]]:
    """Prompt tokens that the engines computed under a policy, by their own count, and the answers."""
    gateway = new_gateway(f"gateway-{policy}", fleet.engines, model, folder, policy)
    with ExitStack() as stack:
        EngineFleet(gateway, fleet.engines).start_gateway(stack)
        before = fleet.computed_prompt_tokens()
        answers = send_at_once(gateway, calls, CONCURRENCY)
        return fleet.computed_prompt_tokens() - before, answers


def test_placement_leaves_engines_few_prompt_tokens_to_compute(
    fleet: EngineFleet, calls: list[WorkloadCall], model: Path, folder: Path, findings: Findings
) -> None:
    computed, asked = dict[str, float](), 0
    for policy in ("round_robin", "plait") if NIGHTLY else ("plait",):
        fleet.evict_all()
        computed[policy], answers = run(fleet, policy, calls, model, folder)
        asked = sum(answer.prompt_tokens for answer in answers)
        findings.figures[f"{policy}, {CALLS} calls at concurrency {CONCURRENCY}"] = {
            "prompt tokens": asked,
            "computed": computed[policy],
            "mean TTFT (s)": fmean(answer.ttft_s for answer in answers),
        }
    assert computed["plait"] < asked
    if NIGHTLY:
        ratio = computed["plait"] / computed["round_robin"]
        assert findings.at_most("prompt tokens computed on real engines, plait / round_robin", ratio, 0.6)
