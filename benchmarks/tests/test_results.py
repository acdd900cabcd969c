"""Pages of results: what they say of a figure, that the stored reports say so, and that no other page contradicts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.__main__ import names
from benchmarks.reporting.figures import Figure, shown
from benchmarks.reporting.named import contradictions, pages, unnamed
from benchmarks.reporting.papers import PAPERS
from benchmarks.reporting.plots import SHOWN
from benchmarks.reporting.stored import FOLDER, Stored
from plait.gateway.cli import parse
from plait.lab.commands.demo import QUICK_CALLS, TURNS, compared
from plait.lab.simulation.compare import Experiment


def test_pages_and_plots_are_what_the_reports_say() -> None:
    made = results.written(Stored.read())
    others = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert not others, "run: python -m benchmarks results"
    assert len(made) == 2 + len(SHOWN)


def test_the_page_has_ten_sentences_and_six_plots() -> None:
    text, _, _ = (results.DOCS / "results.md").read_text(encoding="utf-8").partition("## What does not hold")
    assert text.count("\n- **") == 4
    assert len(re.findall(r"^!\[.+\]\(images/results/\w+\.svg\)$", text, re.MULTILINE)) == len(SHOWN) == 6


@pytest.mark.parametrize("path", pages(results.ROOT), ids=lambda path: str(path.relative_to(results.ROOT)))
def test_no_sentence_contradicts_a_report(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert list(contradictions(text, Stored.read())) == []
    if path.name not in {"results.md", "claims.md"}:  # written from the reports
        assert list(unnamed(text)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3.2<!-- mission: E2E --> times", []),
        ("3.18<!-- mission: E2E -->", []),
        ("3.3<!-- mission: E2E --> times", ["3.3: mission has 3.177: E2E"]),
        ("a share of .31<!-- 1 / mission:\nE2E -->", []),
        ("31 % <!-- 1 / mission: E2E -->", []),
        ("32 % <!-- 1 / mission: E2E -->", ["32 %: mission has 31.48: E2E"]),
        ("3.2<!-- mission: TTFT -->", ["3.2: mission has no claim 'TTFT'"]),
        ("3.2<!-- missing: E2E -->", ["3.2: missing has no claim 'E2E'"]),
    ],
)
def test_a_named_figure_is_compared_to_all_its_digits(text: str, said: list[str]) -> None:
    stored = Stored({"mission": {"claims": [{"name": "E2E", "value": 3.177}]}})
    assert list(contradictions(text, stored)) == said


def test_a_figure_that_refers_to_the_results_has_to_be_named() -> None:
    text = "It takes 3.2 times as long. [Results](results.md) has 40 % more. Others take 3<!-- mission: E2E -->."
    assert list(unnamed(text)) == ["[Results](results.md) has 40 % more."]
    assert not list(unnamed("[Results](results.md) has .4<!-- mission: E2E --> of it."))


def test_a_claim_keeps_the_day_since_when_it_fails() -> None:
    fails, other = {"name": "E2E", "value": 2, "holds": False}, {"name": "TTFT", "value": 2, "holds": False}
    first = results.dated({"claims": [fails]}, {}, "2026-11-28")
    assert first == {"stored": "2026-11-28", "claims": [{**fails, "since": "2026-11-28"}]}
    assert results.dated({"claims": [fails]}, first, "2026-12-01") == first
    second = results.dated({"claims": [fails, other]}, first, "2026-12-01")
    assert (second["stored"], [claim["since"] for claim in second["claims"]]) == (
        "2026-12-01",
        ["2026-11-28", "2026-12-01"],
    )
    holds = {**fails, "holds": True}
    assert results.dated({"claims": [holds]}, second, "2026-12-02")["claims"] == [holds]


def test_each_command_is_on_a_page_or_run_by_a_part_of_ci() -> None:
    texts = [
        path.read_text(encoding="utf-8")
        for path in (*pages(results.ROOT), results.ROOT / "CONTRIBUTING.md", results.ROOT / "Makefile")
    ]
    for name in names():
        assert any(re.search(rf"(benchmarks[ .]|`){name}\b", text) for text in texts), f"nobody runs {name}"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_report_names_the_command_that_writes_it(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    program, name = re.match(r"python -m (\w+) (\w+)", report["command"]).groups()  # type: ignore[union-attr]
    assert program == "benchmarks"
    assert path.stem == name or f" --{path.stem.removeprefix(f'{name}_')}" in report["command"]
    assert name in names()
    assert ("machine" in report) == ("date" in report)
    assert all(claim["holds"] or claim["since"] <= report["stored"] for claim in report["claims"])


def test_the_claims_hold_in_a_quick_run_and_the_readme_has_its_table() -> None:
    """With seed 1, as the README says; docs and tests have no other seed's figures."""
    assert parse(["demo", "--compare", "--quick", "--markdown"]).quick
    quick = compared(Experiment(calls=QUICK_CALLS, turns=TURNS), None)
    assert not [claim for claim in quick.claims() if not claim.holds]
    text = results.README.read_text(encoding="utf-8")
    assert results.with_table(text, quick.markdown()) == text


def test_the_readmes_table_is_found() -> None:
    text = results.README.read_text(encoding="utf-8")
    assert results.with_table(text, results.README_TABLE + " new |\n| --- | --- |") != text
    begins = text.index(results.README_TABLE)
    table = text[begins : text.index("\n\n", begins)]
    assert results.with_table(text, table) == text


def test_the_readme_has_the_gains_of_the_reports() -> None:
    text = results.README.read_text(encoding="utf-8")
    made = results.gains(Stored.read())
    assert results.with_table(text, made, results.README_GAINS) == text, made


def test_the_page_of_the_local_scheduler_has_the_goodput_of_its_variants() -> None:
    text = (results.ROOT / "docs" / "local_scheduler.md").read_text(encoding="utf-8")
    shown = {variant: cells for variant, *cells in re.findall(r"`(slo_\w+)`[^|]*\| ([\d.]+) \| ([\d.]+) \|", text)}
    assert len(shown) == 8
    for variant, cells in shown.items():
        rows = Stored.read().rows("local_scheduler", figure="rate", tpot="range", long_share=0.35, system=variant)
        goodput = {row["rate_per_s"]: f"{row['goodput_calls_s']:.3f}" for row in rows}
        assert cells == [goodput[0.3], goodput[0.6]], variant


def test_every_figure_has_a_number_or_a_reason() -> None:
    for figures in PAPERS.values():
        assert all(figure.ours or figure.why for figure in figures)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (None, "not here"),
        ([1.0, 1.3], "behind"),
        ([1.45], "in part"),
        ([1.0, 4.0], "in part"),
        ([1.45, 2.9], "reproduced"),
        ([1.5, 4.0], "better"),
    ],
)
def test_of_a_range_both_ends_count(ours: list[float] | None, verdict: str) -> None:
    values = None if ours is None else lambda _stored: ours
    figure = Figure(number="3", what="E2E", least=1.5, most=3.0, ours=values, why="no GPU")
    assert figure.row(Stored({}))[5] == verdict


@pytest.mark.parametrize(("ours", "verdict"), [(1.4, "behind"), (1.45, "reproduced"), (1.6, "better")])
def test_a_single_value_is_compared(ours: float, verdict: str) -> None:
    assert Figure(number="3", what="E2E", least=1.5, ours=lambda _stored: [ours]).row(Stored({}))[5] == verdict


@pytest.mark.parametrize(("ours", "verdict"), [(0.9, "behind"), (1.2, "reproduced")])
def test_a_gain_that_is_only_drawn_is_a_gain(ours: float, verdict: str) -> None:
    figure = Figure(number="4", what="E2E", published="drawn only", ours=lambda _stored: [ours])
    assert figure.row(Stored({}))[5] == verdict


def test_a_figure_without_its_report_is_not_run() -> None:
    figure = Figure(number="3", what="E2E", least=1.5, ours=lambda stored: [stored.value("preble", "mean")])
    assert figure.row(Stored({}))[3:6] == ["", "", "not run"]


def test_values_are_shown_as_a_range() -> None:
    assert [shown([]), shown([2.0]), shown([1.501, 14.5, 3]), shown([245, 2931.4])] == [
        "",
        "2",
        "1.5 to 14.5",
        "245 to 2,931",
    ]


def test_claims_are_found_by_what_they_say() -> None:
    claims = [{"name": "video, 2 A6000: mean", "value": 2.0}, {"name": "tools, 2 A6000: mean", "value": 3.0}]
    stored = Stored({"preble": {"claims": claims, "results": [{"seed": 1, "e2e_s": 4.0}, {"seed": 2}]}})
    assert [claim["value"] for claim in stored.claims("preble", "video")] == [2.0]
    assert stored.value("preble", "tools, 2 A6000: mean") == 3.0
    assert list(stored.rows("preble", seed=2)) == [{"seed": 2}]
    with pytest.raises(LookupError, match="chat"):
        stored.claims("preble", "chat")
    with pytest.raises(LookupError, match="mean"):
        stored.value("preble", "mean")
