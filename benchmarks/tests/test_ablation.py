"""The placement ablation: a quick run from end to end, its claims, and the policies that it composes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import ablation
from benchmarks.ablation import Figures, Point, claims, markdown
from benchmarks.placing.published import PublishedShift, most_decoding
from benchmarks.placing.rebalancing import spare_compute
from benchmarks.placing.steps import AS_PUBLISHED, PAPER, STEPS
from benchmarks.placing.terms import TERMS, without
from benchmarks.tests.test_rebalancing import booked, new_engine
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.prefill_queue import Prefill
from plait.policy.costs.situation import Situation, Traffic
from plait.policy.placement.least_delay import least_delay
from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.types import Call

CALL = Call("call", "model", 30, 10, chain([1, 2, 3], 1, 0))


def test_a_quick_run_reports_every_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    options = ["--quick", "--rates", "1.5", "--traces", str(tmp_path / "none"), "--json", str(report), "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["ablation", *options])
    assert ablation.main() in {0, 1}
    written = json.loads(report.read_text())
    assert [row["step"] for row in written["results"]] == list(STEPS)
    assert all(row["rate"] == 1.5 and row["e2e_s"] > 0 for row in written["results"])
    assert {claim["name"].partition(":")[0] for claim in written["claims"]} >= {step.name for step in PAPER[1:]}
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in STEPS)


def figures(e2e_s: float, p99_s: float) -> Figures:
    return Figures(1.0, 2.0, e2e_s, p99_s, hit_rate=0.5, added_share=0.25, busiest_share=0.4, decode_share=0.9)


def test_a_step_that_does_not_help_says_what_it_did() -> None:
    same = {Point(1.5, name): figures(4.0, 8.0) for name in STEPS}
    better = {**same, Point(1.5, "+ E2"): figures(5.0, 4.0)}
    claim = next(claim for claim in claims(better) if claim.name.startswith("+ E2:"))
    assert claim.value == pytest.approx(2.0)
    assert (claim.holds, claim.where) == (True, "p99")
    useless = next(claim for claim in claims(same) if "+ decode balance: E2E over + shift" in claim.name)
    assert not useless.holds
    assert not useless.fails
    assert "it placed 25.00 % of the calls" in useless.excused
    assert len(list(markdown(same))) == len(STEPS) + 2


def test_a_sum_that_is_faster_with_a_part_less_fails_its_claim() -> None:
    same = {Point(1.5, name): figures(4.0, 8.0) for name in STEPS}
    name = "plait without queue"
    faster = {**same, Point(1.5, name): replace(figures(4.0, 8.0), e2e_s=3.5)}
    failed = [claim.name for claim in claims(faster) if not claim.holds]
    assert f"plait: E2E over {name}" in failed


def situation(engines: list[EngineView], tree: PrefixTree) -> Situation:
    return Situation(tree.match(CALL.block_hashes), engines, 0, 0.0, Traffic(180.0, 1.0))


@pytest.mark.parametrize("term", TERMS)
def test_without_a_part_the_sum_ignores_it(term: str) -> None:
    """One engine has a long queue: only the sum without the queue goes there, to the prefix."""
    tree = PrefixTree()
    engines = [new_engine(name, tree) for name in "ab"]
    booked(engines[0], tree, "\x01\x02\x03", 30)
    prefill = Prefill(1000, 1.0, 0.0, 0.0)
    engines[0].begin(0.0, prefill)
    engines[0].send(0.0, prefill, 0.0)
    assert least_delay(CALL, situation(engines, tree)).engine_id == "b"
    assert without(term).place(CALL, situation(engines, tree)).engine_id == ("a" if term == "queue_s" else "b")


def test_without_a_part_that_is_nothing_the_sum_is_the_same() -> None:
    tree = PrefixTree()
    engines = [new_engine(name, tree) for name in "ab"]
    booked(engines[1], tree, "\x01\x02\x03", 30)
    shipped = least_delay(CALL, situation(engines, tree))
    assert shipped.engine_id == "b"
    for term in ("queue_s", "stall_s", "slow_s"):  # nobody is there
        found = without(term).place(CALL, situation(engines, tree))
        assert found == shipped._replace(compared=None), "an ablation does not tell what it compared"


def test_shift_as_published_sends_single_calls_to_the_lightest_engine() -> None:
    tree = PrefixTree()
    heavy, light = (new_engine(name, tree) for name in "ab")
    booked(heavy, tree, "s", 160)
    booked(light, tree, "t", 100)
    shift = PublishedShift()
    shift.rebalance([heavy, light], 0.0)
    assert shift.redirect(CALL, situation([heavy, light], tree), heavy) is light
    assert shift.redirect(CALL, situation([heavy, light], tree), light) is None
    booked(light, tree, "t", 10)
    shift.rebalance([heavy, light], 1.0)
    assert shift.redirect(CALL, situation([heavy, light], tree), heavy) is None


def test_decode_balance_as_published_needs_no_engine_that_stands_out() -> None:
    tree = PrefixTree()
    engines = [new_engine(name, tree) for name in "ab"]
    for engine in engines:
        booked(engine, tree, "", 10, output=90)
    assert most_decoding(engines) is engines[0]
    assert spare_compute(engines) is None
    assert {step.before for step in AS_PUBLISHED} == {None}
