"""Preble's workloads as published: what is in them, and that where ours stands follows from figures by rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.placing.policy_runs import BASE, OURS, Figures
from benchmarks.placing.preble_published import GAMES, LOADS, SETS
from benchmarks.placing.preble_workloads import WORKLOADS
from benchmarks.placing.published_report import RIVALS, Standing, Task, report, run, tasks_of
from benchmarks.preble import PAPER

FIGURES = Figures(1.0, 2.0, 4.0, 9.0, 5.0, 0.5, 0.25, 0)


def test_both_kinds_of_generators_have_the_same_five_workloads() -> None:
    assert list(LOADS) == list(WORKLOADS)
    assert {*SETS, GAMES} == set(LOADS)
    assert all(len(loads) == 4 for loads in LOADS.values())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("engines", [2, 4])
def test_a_set_is_fixed_and_grows_with_the_engines(name: str, engines: int) -> None:
    """Runs of other seeds have other calls, and the same seed has the same."""
    one = SETS[name]
    calls = one.shuffled(engines, 4.0, 1)
    assert len(calls) == one.calls * engines // 2
    asked = {call.prefix for call in calls}
    assert 0.8 * one.number * engines // 2 <= len(asked) <= one.number * engines // 2
    assert [call.arrives_s for call in calls] == sorted(call.arrives_s for call in calls)
    assert calls[-1].arrives_s == pytest.approx(len(calls) / (4.0 * engines / 2), rel=0.15)
    assert [call.prompt.tokens for call in calls] == [call.prompt.tokens for call in one.shuffled(engines, 4.0, 1)]
    assert [call.prompt.tokens for call in calls] != [call.prompt.tokens for call in one.shuffled(engines, 4.0, 2)]


def test_tools_are_asked_equally_often_and_videos_by_their_length() -> None:
    tools = Counter(call.prefix for call in SETS["tool use"].shuffled(2, 4.0, 1))
    assert set(tools.values()) == {3}
    videos = SETS["video"].shuffled(2, 4.0, 1)
    by_video = Counter(call.prefix for call in videos)
    tokens = {call.prefix: call.prompt.tokens for call in videos}
    assert max(tokens.values()) < 8_192 + 300
    often = [tokens[video] for video, count in by_video.items() if count >= 3]
    seldom = [tokens[video] for video, count in by_video.items() if count == 1]
    assert sum(often) / len(often) > 1.5 * sum(seldom) / len(seldom)


@pytest.mark.parametrize(
    ("by_seed", "standing"),
    [
        ([1.05, 1.04, 1.10], "ahead"),
        ([1.20, 1.10, 0.99], "level"),
        ([1.02, 1.01, 1.02], "level"),
        ([0.98, 0.99, 0.98], "level"),
        ([0.90, 0.99, 0.95], "behind"),
        ([0.90, 1.01, 0.80], "level"),
    ],
)
def test_seeds_have_to_agree_and_the_mean_to_differ(by_seed: list[float], standing: str) -> None:
    assert Standing.of(by_seed) == standing


def test_a_report_says_where_ours_stands() -> None:
    tasks = tasks_of(["programming"], [2], [1, 2])
    times = {OURS: 1.0, BASE: 2.0, "smg": 0.9}
    found = {task: replace(FIGURES, e2e_s=4 * times.get(task.policy, 1.0)) for task in tasks}
    slow = Task("programming", 2, LOADS["programming"][-1], 2, BASE)
    found[slow] = replace(FIGURES, e2e_s=4 * 8.0)
    made = report(PAPER, 0.97, found)
    claims = {claim.name: claim for claim in made.claims}
    best = claims["programming, 2 engines: mean E2E, round_robin / plait, at the load that gains most"]
    assert best.value == pytest.approx(4.0)
    assert best.by_seed == pytest.approx((2.0, 8.0))
    assert best.least == 1.56
    assert claims["programming, 2 engines: mean E2E, smg / plait, geometric mean of the loads"].fails
    assert claims["programming, 2 engines: mean E2E, lmetric / plait, geometric mean of the loads"].holds
    last = made.lines[-1]
    assert "0.90 (0.90 to 0.90) behind" in last
    assert last.count("level") == len(RIVALS) - 2
    assert last.endswith("| 1.56 | 4.00 | reached |")


@pytest.mark.parametrize("workload", ["programming", GAMES])
def test_a_run_is_the_same_each_time(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.placing.preble_published.GAME_CALLS", 60)
    monkeypatch.setitem(SETS, workload, replace(SETS["programming"], calls=60))
    task = Task(workload, 2, 8.0, 1, OURS)
    assert run(task) == run(task)
