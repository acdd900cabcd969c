"""Full fleets: the workloads are what they are said to be, a quick run reports every system, and what is claimed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import full_fleet
from benchmarks.filling.claims import claims
from benchmarks.filling.report import markdown
from benchmarks.filling.runs import AT_ONCE, Figures, Plan, Point, Runner
from benchmarks.filling.systems import FleetSize
from benchmarks.filling.workloads import (
    BURST_S,
    BURST_TIMES,
    MAX_TRACE_OUTPUT_TOKENS,
    PERIOD_S,
    QUIET_SHARE,
    VIDEO,
    burst,
    burst_time,
    documents,
    mooncake,
    tools,
    video,
)
from benchmarks.mixed_prompts import LONG_FILE
from plait.lab.simulation.simulate import SimulatedCall
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

MADE = {"documents": documents, "video": video, "tools": tools, "burst": burst}
MEAN_ANSWERS = {"documents": 64, "video": 40, "tools": 60, "burst": 120}


def shared_tokens(calls: Sequence[SimulatedCall]) -> float:
    """The part of all prompts that an infinite cache would have, in whole tree blocks."""
    seen: set[int] = set()
    cached = 0
    for call in calls:
        cached += TREE_BLOCK_TOKENS * sum(block in seen for block in call.prompt.tree_chain.hashes)
        seen.update(call.prompt.tree_chain.hashes)
    return cached / sum(call.prompt.tokens for call in calls)


@pytest.mark.parametrize("name", MADE)
def test_a_workload_has_its_calls_rate_and_answers(name: str) -> None:
    calls = MADE[name](900, 2.0, 3)
    arrivals = [call.arrives_s for call in calls]
    assert len(calls) == 900
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(450, rel=0.15)
    assert fmean(call.output_tokens for call in calls) == pytest.approx(MEAN_ANSWERS[name], rel=0.12)
    ends = {call.prompt.chain.hashes[-1] for call in calls if call.prompt.tokens % 16 == 0}
    assert len(ends) == sum(call.prompt.tokens % 16 == 0 for call in calls), "two prompts are equal"


@pytest.mark.parametrize("name", MADE)
def test_the_rate_changes_only_the_times_and_the_number_only_the_end(name: str) -> None:
    def contents(calls: Sequence[SimulatedCall]) -> list[tuple[int, list[int], int]]:
        return [(call.prompt.tokens, list(call.prompt.chain.hashes), call.output_tokens) for call in calls]

    at_once, longer = MADE[name](40, inf, 1), MADE[name](90, 1.0, 1)
    assert {call.arrives_s for call in at_once} == {0.0}
    assert contents(at_once) == contents(longer)[:40]
    assert contents(at_once) != contents(MADE[name](40, inf, 2))


@pytest.mark.parametrize(("name", "least", "most"), [("documents", 0.9, 1), ("tools", 0.7, 0.97), ("burst", 0.85, 1)])
def test_calls_share_prefixes(name: str, least: float, most: float) -> None:
    calls = MADE[name](500, 1.0, 1)
    assert least < shared_tokens(calls) < most
    prefixes = Counter(call.prefix for call in calls).most_common()
    if name == "burst":
        assert len(prefixes) == 50
        assert prefixes[0][1] < 2.5 * 500 / 50
    else:
        assert prefixes[0][1] > 2 * prefixes[5][1], "the popularity is not Zipf's"


def test_documents_come_and_go() -> None:
    calls = video(1800, 1.0, 1)
    asked = Counter(call.prefix for call in calls)
    assert asked.most_common(1)[0][1] == VIDEO.askings
    assert sum(times == VIDEO.askings for times in asked.values()) > 100
    places = {prefix: [number for number, call in enumerate(calls) if call.prefix == prefix] for prefix in asked}
    assert max(found[-1] - found[0] for found in places.values()) < 1.3 * 40 * VIDEO.askings
    assert shared_tokens(calls) == pytest.approx(1 - 1 / VIDEO.askings, abs=0.05)


def test_bursts_have_the_mean_rate() -> None:
    assert burst_time(0) == 0
    assert burst_time(QUIET_SHARE * (PERIOD_S - BURST_S)) == PERIOD_S - BURST_S
    assert burst_time(1.5 * PERIOD_S) == pytest.approx(PERIOD_S + PERIOD_S - BURST_S + 17.5 / BURST_TIMES)
    assert burst_time(3 * PERIOD_S) == 3 * PERIOD_S
    calls = burst(2400, 10.0, 1)
    in_bursts = sum(call.arrives_s % PERIOD_S >= PERIOD_S - BURST_S for call in calls)
    assert in_bursts / len(calls) == pytest.approx(BURST_TIMES * BURST_S / PERIOD_S, abs=0.06)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    rows = [
        {"input_length": 1100, "output_length": 900, "hash_ids": [0, 1, 2]},
        {"input_length": 1500, "output_length": 30, "hash_ids": [0, 1, 3]},
        {"input_length": 30_001, "output_length": 1, "hash_ids": [*range(59)]},
    ]
    (tmp_path / LONG_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_trace_is_cut_and_shares_its_blocks(traces: Path) -> None:
    calls = mooncake(traces, 5, 1.0, 1)
    by_tokens = {call.prompt.tokens: call for call in calls}
    assert {tokens: call.output_tokens for tokens, call in by_tokens.items()} == {
        1100: MAX_TRACE_OUTPUT_TOKENS,
        1500: 30,
    }
    one, other = (by_tokens[tokens].prompt.chain.hashes for tokens in (1100, 1500))
    assert one[:64] == other[:64]
    assert not set(one[64:]) & set(other[64:])
    assert [call.prompt.tokens for call in calls[:3]] == [call.prompt.tokens for call in calls[2:5]], "it begins anew"


def test_a_quick_run_reports_every_system(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = traces / "report.json"
    options = ["--quick", "--engines", "2", "--jobs", "1", "--seeds", "3", "--loads", "0.5", "2"]
    options += ["--workloads", "tools", "mooncake", "--traces", str(traces / "none"), "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["full_fleet", *options, "--systems", "round_robin"])
    assert full_fleet.main() == 0
    written = json.loads(report.read_text())
    assert written["inputs"]["skipped"] == {"mooncake": LONG_FILE}
    assert [(row["load"], row["system"]) for row in written["results"]] == [
        (load, system) for load in (None, 0.5, 2.0) for system in ("none", "round_robin")
    ]
    assert {(row["workload"], row["seed"], row["refused_calls"]) for row in written["results"]} == {("tools", 3, 0)}
    assert all(0 < row["ttft_mean_s"] <= row["ttft_longest_s"] for row in written["results"])
    saturation_per_s = max(row["completed_per_s"] for row in written["results"][:2])
    assert written["results"][-1]["rate_per_s"] == pytest.approx(2 * saturation_per_s)
    printed = capsys.readouterr().out
    assert f"skipped: mooncake, no {LONG_FILE}" in printed
    assert "| at once | round_robin |" in printed
    assert "holds" not in printed


def test_all_at_once_takes_long_enough() -> None:
    plan = Plan(systems=("none",), fleet=FleetSize(engines=1), loads=(), calls=5, at_once_s=20.0)
    ((point, figures),) = Runner(plan, Path())(("burst", 1)).items()
    assert point == Point("burst", AT_ONCE, "none", 1)
    assert figures.calls > 5
    assert figures.timely_per_s == 0


def figures(e2e_s: float, ttft_s: float, completed_per_s: float, hit_rate: float) -> Figures:
    return Figures(
        calls=800, rate_per_s=1.0, refused_calls=0, ttft_mean_s=ttft_s, ttft_p99_s=9.0, ttft_longest_s=10.0,
        e2e_mean_s=e2e_s, hit_rate=hit_rate, completed_per_s=completed_per_s, timely_per_s=1.0,
    )  # fmt: skip


def results(admission: Figures) -> dict[Point, Figures]:
    """Two workloads at two loads and at once, with two seeds; admission is the same everywhere."""
    systems = {
        "none": figures(10.0, 2.0, 4.0, 0.9),
        "round_robin": figures(12.0, 3.0, 5.0, 0.7),
        "admission": admission,
    }
    return {
        Point(workload, load, system, seed): one
        for workload in ("tools", "video")
        for load in (0.5, 1.5, AT_ONCE)
        for seed in (1, 2)
        for system, one in systems.items()
    }


def failed(made: dict[Point, Figures]) -> list[str]:
    return [claim.name.partition(",")[0] for claim in claims(made) if not claim.holds]


def test_admission_is_held_to_the_claims() -> None:
    good = figures(9.9, 2.1, 5.1, 0.89)
    assert [claim.holds for claim in claims(results(good))] == [True] * 8
    assert failed(results(replace(good, e2e_mean_s=10.4))) == ["mean E2E", "mean E2E"]
    assert failed(results(replace(good, ttft_mean_s=2.8))) == ["mean TTFT", "mean TTFT"]
    assert failed(results(replace(good, hit_rate=0.87))) == ["hit rate"]
    assert failed(results(replace(good, completed_per_s=4.9))) == ["completed calls/s"]
    assert failed(results(replace(good, completed_per_s=4.7))) == ["completed calls/s"] * 2
    assert not list(claims({point: one for point, one in results(good).items() if point.system != "admission"}))


def test_a_claim_names_the_worst_load() -> None:
    good = results(figures(9.9, 2.1, 5.1, 0.89))
    for seed in (1, 2):
        good[Point("video", 0.5, "admission", seed)] = figures(12.0, 2.1, 5.1, 0.89)
    worst = [claim for claim in claims(good) if "E2E" in claim.name and not claim.holds]
    assert [claim.value for claim in worst] == pytest.approx([(0.99 * 1.2) ** 0.5, 1.2])
    assert "video 0.5" in worst[1].name
    rows = [row for row in markdown(good) if row.startswith("| 0.5 | admission")]
    assert [row.split(" | ")[-1] for row in rows] == ["1.275 |", "1.275 |", "1.0 points |"]
