"""Promised times in a full fleet: the calls are what they are said to be, and what is wanted is compared."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from benchmarks import full_fleet
from benchmarks.filling.promise_report import claims, markdown
from benchmarks.filling.promises import CALLERS, CHAT, LONG, NO_JCT, PROMISES, SHORT, Kept, Point, Workload
from plait.lab.simulation.simulate import CallRecord
from plait.policy.types import Slo


def test_short_calls_are_promised_a_time_and_others_are_not() -> None:
    calls = Workload(PROMISES["ttft-0.3"], CALLERS["bystander"], 0, 1).calls(520, 2.0)
    assert {call.prefix: (call.tenant, call.slo) for call in calls} == {
        SHORT: ("a", Slo(ttft_s=0.3)),
        LONG: ("b", None),
        CHAT: ("c", None),
    }
    counts = Counter(call.prefix for call in calls)
    assert counts[SHORT] == pytest.approx(400, rel=0.1)
    assert counts[LONG] == pytest.approx(100, rel=0.2)
    assert all(call.prompt.tokens == 8_600 for call in calls if call.prefix == LONG)
    assert len({call.prompt.chain.hashes[0] for call in calls if call.prefix == LONG}) == counts[LONG]
    assert calls[-1].arrives_s == pytest.approx(260, rel=0.15)


def test_long_prompts_may_share_contexts() -> None:
    calls = Workload(PROMISES[NO_JCT], CALLERS["one"], 3, 1).calls(60, inf)
    assert len({call.prompt.chain.hashes[0] for call in calls if call.prefix == LONG}) == 3
    assert {call.slo for call in calls} == {None}
    assert {call.arrives_s for call in calls} == {0.0}


def test_a_promise_is_kept_if_all_of_its_times_are() -> None:
    record = CallRecord(SHORT, 100, 11, 1.0, first_token_s=1.25, finished_s=2.25)
    kept = {
        name: replace(PROMISES[NO_JCT], slo=slo).is_kept(record)
        for name, slo in {
            "nothing": Slo(),
            "TTFT": Slo(ttft_s=0.25),
            "late TTFT": Slo(ttft_s=0.24),
            "TPOT": Slo(tpot_s=0.1),
            "late TPOT": Slo(ttft_s=0.3, tpot_s=0.09),
            "JCT": Slo(jct_s=1.25),
            "late JCT": Slo(jct_s=1.2),
        }.items()
    }
    assert [name for name, is_kept in kept.items() if not is_kept] == ["late TTFT", "late TPOT", "late JCT"]


def kept(share: float, completed_per_s: float = 4.0) -> Kept:
    return Kept(
        calls=100, refused=0, kept=share, ttft_p50_s=0.1, ttft_p99_s=0.3, long_ttft_p50_s=2.0,
        completed_per_s=completed_per_s, tokens_per_s=5e3,
    )  # fmt: skip


def test_the_worst_load_counts_and_jcts_may_not_cost_calls() -> None:
    results = {
        Point("ttft-0.3", "one", 0.5, "admission", 1): kept(1.0),
        Point("ttft-0.3", "one", 0.5, "admission", 2): kept(0.99),
        Point("ttft-0.3", "one", 1.2, "admission", 1): kept(0.98),
        Point("ttft-0.3", "one", 1.2, "none", 1): kept(0.99),
        Point("ttft-0.3", "one", 1.2, "fcfs", 1): kept(0.2),
        Point("ttft-0.3", "bystander", 1.2, "admission", 1): kept(0.96),
        Point("jct-2.5", "one", 0.85, "admission", 1): kept(0.96, 3.8),
        Point(NO_JCT, "one", 0.85, "admission", 1): kept(1.0, 4.0),
    }
    made = list(claims(results))
    assert [(claim.value, claim.holds) for claim in made] == [
        (0.98, False),
        (0.98 / 0.99, False),
        (0.96, True),
        (0.96, True),
        (0.95, False),
    ]
    assert made[0].name == "ttft-0.3 kept, callers one, at its worst (load 1.2; none: 0.990; fcfs: 0.200)"
    assert made[1].name == "ttft-0.3 kept, callers one, over the better of none, fcfs there"
    assert "| 0.5 | admission | 0.995 |" in "\n".join(markdown(results))


def test_the_line_is_not_blamed_for_what_is_not_kept_without_one_either() -> None:
    for without, is_blamed in ((0.99, True), (0.98, False)):
        results = {
            Point("ttft-0.3", "one", 1.0, "admission", 1): kept(0.98),
            Point("ttft-0.3", "one", 1.0, "none", 1): kept(without),
        }
        worst, over_the_better = claims(results)
        assert (worst.holds, worst.fails) == (False, is_blamed)
        assert over_the_better.fails is is_blamed
        assert next(claims(results, excuses=False)).fails


def test_a_run_reports_every_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--promises", "ttft-0.3", "--callers", "two", "--loads", "0.5", "--seconds", "10", "--seeds", "1"]
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["full_fleet", *options, "--engines", "1", "--jobs", "1", "--json", str(report)])
    status = full_fleet.main()
    written = json.loads(report.read_text())
    by_system = {row["system"]: row for row in written["results"]}
    assert list(by_system) == ["none", "admission", "fcfs", "fcfs, admission"]
    assert by_system["none"]["kept"] == 1
    assert status == int(not written["claims"][0]["holds"])
    assert "### ttft-0.3, callers two" in capsys.readouterr().out
