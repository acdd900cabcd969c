"""The curves of docs/results.md: every task runs, and the report has a row for each point."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import curves
from benchmarks.curves import CURVES, LOADS, SIZES, Task, report, tasks_of
from plait.lab.simulation.simulate import SimulatedCall


def test_timelines_are_of_one_run_and_the_rest_of_each_seed() -> None:
    tasks = [task for curve in CURVES for task in tasks_of(curve, (1, 2))]
    assert len(set(tasks)) == len(tasks) == 2 * (5 + 3) + 2


def test_each_load_is_run_with_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "LOADS", (0.5, 1.0))
    task = Task("loads", "least_outstanding", 1)
    found = curves.NewRunner(quick=True)(Path())(task)
    assert [point["load"] for point in found] == [0.5, 1.0]
    assert found[0]["e2e_s"] < found[1]["e2e_s"]
    (row, *_), lines = report({task: found}).results, report({task: found}).lines
    assert row["of"] == "least_outstanding"
    assert lines[2].startswith("| loads | least_outstanding | 0.5 | ")


def test_a_tier_never_lowers_the_hit_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(calls: int, rate: float, seed: int) -> Sequence[SimulatedCall]:
        return workload(min(calls, 60), rate, seed)

    workload = curves.TIERED["documents"]
    monkeypatch.setattr(curves, "SIZES", (0.0, 4.0))
    monkeypatch.setattr(curves, "TIERED", {"documents": few})
    without, with_tier = curves.NewRunner(quick=True)(Path())(Task("tiers", "documents", 1))
    assert without["hit_rate"] <= with_tier["hit_rate"]
    assert LOADS[-1] == 1.0
    assert SIZES[0] == 0.0
