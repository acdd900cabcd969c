"""Replays of decisions: a tiny run, and what the report says of a few known ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.margins import BANDS, Found, Plan, Runner, Task, claims, in_band, rank_correlation, ranks, report
from benchmarks.placing.replays import WINDOWS_S, Decision, Parts, Replay

TASK = Task("tool use", 4, 0.9, 1)


def replayed(margin_s: float, more_s: float, cost_s: float = 1.0) -> Replay:
    return Replay(Decision(0, 0.0, cost_s, Parts(margin_s, 0.0, 0.0)), (Parts(0.0, more_s, 0.0),) * len(WINDOWS_S))


def test_decisions_are_replayed_after_the_warm_up_and_the_same_each_time() -> None:
    runner = Runner(Plan(decisions=4, calls_an_engine=10), Path("no traces"))
    found = runner(TASK)
    assert [one.decision.call for one in found.replays] == [10, 15, 20, 25]
    assert all(one.decision.margin.total_s >= 0 for one in found.replays)
    assert any(one.more[0].total_s for one in found.replays)
    assert found == runner(TASK)
    assert f"| {TASK} | 4 |" in "\n".join(report({TASK: found}).lines)


def test_a_margin_is_in_one_band() -> None:
    some = [replayed(margin_s, 1.0, cost_s=8.0) for margin_s in (0.0, 0.75, 1.0, 7.0, 8.0, 9.0)]
    found = [[one.decision.margin.total_s for one in in_band(some, band)] for band in BANDS]
    assert found == [[8.0, 9.0], [1.0, 7.0], [0.0, 0.75]]


def test_the_claims_are_of_all_decisions() -> None:
    some = [replayed(2.0, 4.0), replayed(3.0, 5.0), replayed(1.0, -1.0)]
    ratio, correlation, wrong = claims(some)
    assert (ratio.value, correlation.value, wrong.value) == pytest.approx((0.75, 1.0, 1 / 3))
    assert ratio.holds
    assert wrong.fails
    lines = "\n".join(report({TASK: Found(tuple(some), 10.0)}).lines)
    assert "0.33 s (3.3%)" in lines, "the better of the two would have saved a second in one of three"
    assert "| tool use | 2.00 / 0.00 | 0.00 / 2.67 | 0.00 / 0.00 |" in lines
    assert "Of 1 runs, 1 have" in lines


def test_equal_values_share_their_rank() -> None:
    assert ranks([5.0, 1.0, 5.0, 7.0]) == [2.0, 0.5, 2.0, 3.5]
    assert rank_correlation([replayed(1.0, 2.0), replayed(2.0, 1.0)]) == pytest.approx(-1.0)
