"""`python -m benchmarks tiers` on a small fleet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from typing import Final

from benchmarks.filling.systems import FleetSize
from benchmarks.filling.workloads import DOCUMENT_LENGTHS, Coming, video
from benchmarks.tiers import AGENTS, HOST, LARGE, SHARE, Figures, Runs, Task, open_loop, report

CALLS: Final = 300
FLEET: Final = FleetSize(engines=2, kv_tokens=50_000)
WORKLOAD: Final = partial(video, document=Coming(4_000, 12, DOCUMENT_LENGTHS))
"""Some 40 documents are asked at a time: more than fit into the caches."""


def test_a_tier_that_placement_knows_is_worth_more_than_one_that_it_does_not_know() -> None:
    _, completed_per_s = open_loop(FLEET, WORKLOAD(CALLS, inf, 7))
    calls = WORKLOAD(CALLS, SHARE * completed_per_s, 7)
    without, _ = open_loop(FLEET, calls)
    known, _ = open_loop(replace(FLEET, host=HOST), calls)
    untold, _ = open_loop(replace(FLEET, host=HOST, knows_host=False), calls)
    assert known.hit_rate > untold.hit_rate > without.hit_rate - 0.05
    assert known.mean_s < 0.8 * without.mean_s
    assert known.mean_s <= 1.01 * untold.mean_s
    assert known.within >= 0.97


def test_a_tier_changes_nothing_where_everything_fits() -> None:
    fleet = replace(FLEET, kv_tokens=400_000)
    calls = WORKLOAD(CALLS, 4.0, 8)
    assert open_loop(fleet, calls) == open_loop(replace(fleet, host=HOST), calls)


def test_claims_are_made_of_the_large_workloads_and_of_agents() -> None:
    figures = Figures(1.0, 0.5)
    runs: Runs = {"none": figures, "gate": replace(figures, mean_s=0.9), "host": replace(figures, mean_s=0.4)}
    runs["untold"] = figures
    claims = report({Task(name, 1, 10): runs for name in (*LARGE, *AGENTS)}).claims
    assert all(claim.holds for claim in claims)
    assert {claim.where for claim in claims} == {"", *LARGE, *AGENTS}
