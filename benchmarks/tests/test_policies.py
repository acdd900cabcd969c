"""Placement policies over all cells: what the report says of a few known runs."""

from __future__ import annotations

import math

import pytest

from benchmarks.placing.policy_intervals import MOST, Interval, interval_claims, interval_table, intervals
from benchmarks.placing.policy_report import Cell, claims, means
from benchmarks.placing.policy_runs import AT_ONCE, BASE, OURS, Figures, Task

LOAD = f"0.9 {BASE}"


def figures(e2e_s: float) -> Figures:
    return Figures(1.0, 2.0, e2e_s, 9.0, 5.0, 0.5, 0.25, 0)


def runs(ours_s: float, best_s: float, load: str = LOAD) -> dict[str, dict[str, Figures]]:
    by_policy = {OURS: figures(ours_s), "other": figures(best_s), BASE: figures(9.0)}
    return {AT_ONCE: by_policy, load: by_policy}


def test_an_interval_is_of_the_ratios_to_the_policy_that_is_best_on_average() -> None:
    results = {Task("tools", 4, seed): runs(ours_s, 2.0) for seed, ours_s in enumerate((1.0, 2.0, 4.0))}
    (found,) = intervals(results, "e2e_s").values()
    assert found.best == "other"
    assert found.ratio == pytest.approx(1.0)
    half = 4.30 * math.log(2) / math.sqrt(3)
    assert [found.low, found.high] == pytest.approx([math.exp(-half), math.exp(half)])
    one = intervals({Task("tools", 4, 0): runs(1.0, 2.0)}, "e2e_s")[Cell("tools", 4, LOAD)]
    assert one == Interval(0.5, 0.5, 0.5, "other")


def test_a_cell_behind_fails_unless_its_workload_may_be() -> None:
    def worst(workload: str, load: str) -> bool:
        found = {figure: intervals({Task(workload, 4, 0): runs(1.08, 1.0, load)}, figure) for figure in ("e2e_s",)}
        assert f"| {workload}, 4 engines, {load} | 1.080 " in "\n".join(interval_table(found))
        return [*interval_claims(found)][1].holds

    assert [worst("tools", LOAD), worst("video", LOAD), worst("loogle", LOAD)] == [False, True, False]
    assert worst("loogle", next(load for workload, load in MOST if workload == "loogle"))


def test_the_older_claims_are_of_equal_engines_behind_one_gateway() -> None:
    results = {
        Task("tools", 4, 0): runs(1.0, 1.0),
        Task("tools", 4, 0, "4 gateways"): runs(9.0, 1.0),
        Task("loogle", 4, 0): runs(9.0, 1.0, "3/s"),
    }
    found = means(results)
    assert len(found) == 6
    made = {claim.name: claim for claim in claims(found)}
    assert made["mean E2E, geometric mean of 1 cells"].value == pytest.approx(1.0)
