"""Tenants in virtual time: who sends what, and what a heavy tenant is held to."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import full_fleet
from benchmarks.filling import tenants
from benchmarks.filling.systems import NONE
from benchmarks.filling.tenant_report import claims, light_claims
from benchmarks.filling.tenants import HEAVY, LOAD, LOOKS_S, SHAPES, WEIGHTS, Contest, Shape, TenantFigures, calls_of
from plait.lab.simulation.claim import Claim
from plait.policy.types import Objective

CONTEST = Contest(shape="tools", load=1.0, seconds=400.0, seed=1)


@pytest.fixture(autouse=True)
def known_saturation(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_s(shape: Shape, engines: int) -> float:
        return 4.4 * engines * (10 if shape is SHAPES["small"] else 1)

    monkeypatch.setattr(tenants, "saturation_per_s", per_s)


def test_the_heavy_tenant_sends_twenty_times_as_much() -> None:
    calls = calls_of(CONTEST)
    sent = {tenant: sum(call.tenant == tenant for call in calls) for tenant in WEIGHTS}
    assert sent[HEAVY] == pytest.approx(1600, rel=0.1)
    assert sent["light-1"] == pytest.approx(80, rel=0.3)
    assert [call.at_s for call in calls] == sorted(call.at_s for call in calls)


def test_the_light_tenants_send_the_same_whatever_the_heavy_one_does() -> None:
    plain, small = calls_of(CONTEST), calls_of(replace(CONTEST, flood="small"))
    assert [call for call in plain if call.tenant != HEAVY] == [call for call in small if call.tenant != HEAVY]
    flood = [call for call in small if call.tenant == HEAVY]
    assert len(flood) == pytest.approx(16_000, rel=0.05)
    assert all(call.question_tokens <= 84 for call in flood)


def test_a_contest_is_compared_with_a_plain_one_or_with_no_admission() -> None:
    contest = replace(CONTEST, flood="small", ttft_s=0.5, objective=Objective.LATENCY)
    assert contest.base == CONTEST
    own = replace(CONTEST, fair=False)
    assert own.base == replace(own, system=NONE)


def figures(light_lost: int, light_p99_s: float, calls_per_s: float, longest_s: float) -> TenantFigures:
    return TenantFigures(
        light_calls=50, light_lost=light_lost, light_kept=1.0, light_ttft_p50_s=0.5, light_ttft_p90_s=0.8,
        light_ttft_p99_s=light_p99_s, heavy_calls=1000, heavy_lost=3, heavy_ttft_p50_s=9.0, heavy_ttft_p90_s=12.0,
        calls_per_s=calls_per_s, longest_wait_s=longest_s,
        lines=dict.fromkeys(LOOKS_S, (4, 2)),
    )  # fmt: skip


def failed(contest: Contest, one: TenantFigures) -> list[str]:
    made = claims({CONTEST: figures(0, 1.0, 5.0, 20.0), contest: one})
    return [claim.name.partition(",")[0] for claim in made if not claim.holds]


def test_a_heavy_tenant_is_held_to_what_a_plain_one_does() -> None:
    with_ttft, flood = replace(CONTEST, ttft_s=0.5), replace(CONTEST, flood="small")
    assert not failed(with_ttft, figures(0, 1.15, 4.9, 22.0))
    assert failed(with_ttft, figures(1, 1.2, 4.8, 23.0)) == [
        "light calls lost",
        "light ttft p99",
        "calls/s",
        "longest wait",
    ]
    assert failed(flood, figures(0, 1.2, 4.0, 40.0)) == ["light ttft p99"]


def test_what_is_known_fails_no_full_run_and_a_lost_call_does() -> None:
    plain = replace(CONTEST, load=LOAD)
    results = {plain: figures(0, 1.0, 5.0, 20.0), replace(plain, flood="small"): figures(1, 1.6, 4.0, 40.0)}
    lost, p99 = (f"light {what}, tools, heavy small, load 1.9" for what in ("calls lost", "ttft p99"))

    def failing(made: Iterable[Claim]) -> list[str]:
        return [claim.name.partition(" /")[0] for claim in made if claim.fails]

    assert failing(claims(results)) == [lost]
    assert failing(light_claims(results)) == [lost, p99]


def test_quiet_conversations_are_held_to_a_third_of_the_busy_ones_wait() -> None:
    contest = replace(CONTEST, fair=False, conversations=True)
    slow = replace(figures(0, 1.0, 5.0, 40.0), light_ttft_p90_s=4.1)
    for one, expected in ((replace(slow, light_ttft_p90_s=4.0), []), (slow, ["TTFT p90 of quiet conversations"])):
        results = {contest.base: figures(0, 1.0, 5.0, 20.0), contest: one}
        assert [claim.name.partition(" /")[0] for claim in claims(results) if not claim.holds] == expected


def test_a_run_compares_a_flood_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    options = [
        "--tenants",
        "--own-flood",
        "--engines",
        "1",
        "--seconds",
        "8",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--json",
        str(report),
    ]
    monkeypatch.setattr(sys, "argv", ["full_fleet", *options])
    status = full_fleet.main()
    written = json.loads(report.read_text())
    assert [(row["system"], row["shape"], row["flood"]) for row in written["results"]] == [
        ("none", "long", "small"),
        ("admission", "long", "small"),
    ]
    assert status == int(not all(claim["holds"] for claim in written["claims"]))
    assert "| long, one tenant, small, admission, load 1.9 |" in capsys.readouterr().out
