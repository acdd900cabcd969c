"""How a benchmark runs: what it keeps, what it says, and when it fails."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from math import inf, nan
from pathlib import Path

import pytest

from benchmarks.running.command import Experiment, conduct, parser, results
from benchmarks.running.kept import Kept
from benchmarks.running.report import Report, finish, table
from plait.lab.simulation.claim import Claim

BENCHMARKS = Path(__file__).parents[1]


def doubled(_traces: Path) -> Callable[[int], int]:
    return lambda task: 2 * task


def summed(found: Mapping[int, int]) -> Report:
    return Report(lines=["| sum |"], claims=[Claim("sum", sum(found.values()), most=6)], results=[{"sum": inf}])


def asked(*options: str) -> argparse.Namespace:
    return parser("What it is for.").parse_args(["--jobs", "1", *options])


@pytest.mark.parametrize(("tasks", "status"), [([1, 2], 0), ([1, 2, 3], 1)])
def test_a_claim_that_fails_is_an_error(
    tasks: list[int], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "report.json"
    assert conduct("doubled", Experiment(tasks, doubled, summed), asked("--json", str(path))) == status
    written = json.loads(path.read_text())
    assert written["results"] == [{"sum": None}]
    assert written["claims"] == [{"name": "sum", "value": 2 * sum(tasks), "wanted": "<= 6", "holds": not status}]
    assert "date" not in written, "in virtual time, the same run writes the same bytes"
    assert capsys.readouterr().out.startswith("| sum |\n")


def test_without_its_traces_an_experiment_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = Experiment([1], doubled, summed, ["trace.csv"])
    assert conduct("doubled", experiment, asked("--traces", str(tmp_path))) == 0
    assert "skipped: no trace.csv in" in capsys.readouterr().out


def test_a_run_goes_on_from_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    kept: Kept[int, int] = Kept(path, re.sub(" at 0x[0-9a-f]+", "", repr(doubled)))
    kept.add(1, 100)
    with path.open("ab") as file:
        file.write(b"\x80\x04half a rec")
    for _ in range(2):
        found = results(Experiment([2, 1], doubled, summed), asked("--results", str(path)))
        assert list(found.items()) == [(2, 4), (1, 100)]


@pytest.mark.parametrize("written", [b"", b"a text\n", b'{"task": 1}\n', None])
def test_a_file_of_other_results_is_left_as_it_is(tmp_path: Path, written: bytes | None) -> None:
    path = tmp_path / "kept"
    if written is None:
        Kept[int, int](path, "other options").add(1, 2)
    else:
        path.write_bytes(written)
    before = path.read_bytes()
    with pytest.raises(SystemExit, match="name another file"):
        Kept[int, int](path, "these").read()
    assert path.read_bytes() == before


def test_a_timed_report_says_where_and_when(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = Report(lines=[], claims=[Claim("none", nan, most=1, excused="nothing came")], is_timed=True)
    assert finish("timed", report, argparse.Namespace(json=path, rounds=3)) == 0
    written = json.loads(path.read_text())
    assert "cores" in written["machine"]
    assert written["inputs"] == {"rounds": 3}
    assert written["claims"] == [
        {"name": "none", "value": None, "wanted": "<= 1", "holds": False, "excused": "nothing came"}
    ]


def test_bounds_are_told_as_they_are() -> None:
    assert [Claim("", 1, least=low, most=high).wanted for low, high in ((0, 0), (1 / 1.03, inf), (-inf, 1500))] == [
        "0",
        ">= 0.971",
        "<= 1,500",
    ]
    assert str(Claim("p99", 0.5, most=0.25, where="load 2")) == "FAILS: p99 (load 2) = 0.500, wanted <= 0.25"


def test_a_table_is_markdown() -> None:
    assert list(table(["a", "b"], [[1, "two"]])) == ["| a | b |", "|---|---|", "| 1 | two |"]


def test_claims_are_judged_in_one_place() -> None:
    commands = {path.name: path.read_text() for path in BENCHMARKS.glob("*.py")}
    assert [name for name, text in commands.items() if "FAILS" in text or '("--json"' in text] == []
