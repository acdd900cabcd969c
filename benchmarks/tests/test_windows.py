"""What it is worth to know where hits end: what gateways know of the hits, and what is claimed of the figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.windowing.fleet import Load, Run, System
from benchmarks.windows import (
    LEAST_WITHIN,
    MOST,
    MOST_OF_RIVAL,
    SEEDS,
    SYSTEMS,
    WINDOW_TOKENS,
    Figures,
    Task,
    claims,
    markdown,
)
from plait.lab.simulation.compare import Experiment, prepare
from plait.lab.simulation.simulate import CallRecord
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS


@pytest.fixture(scope="module")
def load() -> Load:
    asked = Experiment(calls=160, engines=2, window_tokens=WINDOW_TOKENS)
    return Load(asked, prepare(asked, lambda *_: None), rate_per_s=5.0)


@pytest.fixture(scope="module")
def records(load: Load) -> dict[System, list[CallRecord]]:
    return {system: Run(system, load)() for system in SYSTEMS}


def wrong(records: list[CallRecord]) -> float:
    """The share of calls whose hit was predicted wrongly by more than a tree block."""
    off = [abs(one.cached_tokens - one.predicted_cached_tokens) > TREE_BLOCK_TOKENS for one in records]
    return sum(off) / len(off)


def test_the_oracle_knows_each_hit_and_reports_nearly_all(records: dict[System, list[CallRecord]]) -> None:
    assert wrong(records["oracle"]) < 0.02
    assert wrong(records["reported"]) < 0.02
    assert wrong(records["ends ignored"]) > 0.1


def test_without_ends_a_gateway_expects_more_than_there_is(records: dict[System, list[CallRecord]]) -> None:
    predicted, found = (
        sum(getattr(one, name) for one in records["ends ignored"])
        for name in ("predicted_cached_tokens", "cached_tokens")
    )
    assert predicted > 1.05 * found


def test_a_run_is_the_same_each_time(load: Load, records: dict[System, list[CallRecord]]) -> None:
    assert Run("reported", load)() == records["reported"]


def figures(**e2e_s: float) -> dict[System, Figures]:
    times = dict(zip(SYSTEMS, (1.0, 1.0, 1.1, 2.0), strict=True)) | e2e_s
    return {system: Figures(times[system], 0.5 * times[system], 0.8, 0.9, 0.97) for system in SYSTEMS}


def test_each_workload_has_the_bounds() -> None:
    found = {Task("sessions", seed): figures(reported=1.04) for seed in SEEDS} | {Task("documents", 1): figures()}
    found[Task("documents", 1)]["reported"] = replace(figures()["reported"], within=0.9)
    made = {(claim.name, claim.where): (round(claim.value, 3), claim.holds) for claim in claims(found)}
    within, rival = "hits predicted within a tree block", "mean E2E, reported / least outstanding"
    assert made == {
        (within, "sessions"): (0.97, True),
        (rival, "sessions"): (0.52, True),
        ("mean E2E, reported / oracle", "sessions"): (1.04, False),
        (within, "documents"): (0.9, False),
        (rival, "documents"): (0.5, True),
    }
    assert LEAST_WITHIN < 1 < MOST
    assert MOST_OF_RIVAL < 1
    assert any(
        line.startswith("| sessions | 1.00 s, 0.50 s | 1.040, 1.040 | 1.100, 1.100 ") for line in markdown(found)
    )
