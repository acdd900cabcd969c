"""The table of what is claimed: every row can be made, runs by its own runner, and fails aloud."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import mission
from benchmarks.claiming.placement import placement_claims
from benchmarks.claiming.rows import Found, Row, rows
from benchmarks.placing.policy_runs import AT_ONCE, Figures, Task
from plait.gateway.simulation.compare import Claim


def test_a_quick_row_has_fewer_tasks() -> None:
    quick, full = rows(quick=True), rows(quick=False)
    assert list(quick) == list(full)
    for name, row in quick.items():
        assert 0 < len(row.tasks) <= len(full[name].tasks), name
        assert len(set(row.tasks)) == len(row.tasks), name


def claims(found: Found) -> Iterator[Claim]:
    total = sum(found.values())
    yield Claim("the sum", total, ">= 12", total >= 12)


def table(numbers: list[int]) -> dict[str, Row]:
    return {
        "sum": Row(numbers, lambda _traces: lambda number: 2 * number, claims),
        "absent": Row([1], lambda _traces: lambda number: number, claims, ["no_such_file"]),
    }


@pytest.mark.parametrize(("numbers", "status"), [([1, 2, 3], 0), ([1, 2], 1)])
def test_a_row_that_fails_is_an_error(
    numbers: list[int],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(mission, "rows", lambda **_: table(numbers))
    options = ["--jobs", "1", "--traces", str(tmp_path), "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["mission", *options])
    assert mission.main() == status
    assert [(row["row"], row["value"], row["holds"]) for row in json.loads(report.read_text())["claims"]] == [
        ("sum", 2 * sum(numbers), not status)
    ]
    printed = capsys.readouterr().out
    assert "skipped: absent" in printed
    assert ("**fails**" in printed) is bool(status)


def figures(e2e_s: float) -> Figures:
    return Figures(
        ttft_s=1.0, ttft_p99_s=2.0, e2e_s=e2e_s, e2e_p99_s=9.0, completed_per_s=3.0, hit_rate=0.8, largest_share=0.3,
        refused=0,
    )  # fmt: skip


def test_placement_is_compared_with_round_robin_and_e2() -> None:
    by_policy = {"plait": figures(2.0), "round_robin": figures(5.0), "e2": figures(1.9)}
    behind = {**by_policy, "e2": figures(1.6)}
    found = {Task("video", 4, 100): {AT_ONCE: behind, "0.9 round_robin": by_policy, "0.95 best": behind}}
    assert [(claim.name.split(",")[1], claim.holds) for claim in placement_claims(found)] == [
        (" round_robin / plait", True),
        (" e2 / plait", True),
        (" e2 / plait", False),
    ]
