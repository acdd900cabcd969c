"""`plait demo --compare` in virtual time: its figures, its report, and that ours wins on the built-in prompts."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import pytest

from plait.gateway.simulation.compare import (
    Experiment,
    Workload,
    percentile,
    prepare,
    saturation_rate,
    simulate,
    summarise,
)
from plait.gateway.simulation.comparison_report import Report
from plait.gateway.simulation.simulated_call import CallRecord
from plait.policy.types import PlacementReason

SMALL = Experiment(calls=300, kv_tokens=20_000)


def quiet(_label: str, _done: int, _total: int) -> None:
    pass


@lru_cache
def workload() -> Workload:
    return prepare(SMALL, quiet)


@lru_cache
def report() -> Report:
    saturation = saturation_rate(SMALL, workload(), quiet)
    outcomes = [
        summarise(policy, simulate(SMALL, workload(), policy, SMALL.rate * saturation, quiet))
        for policy in SMALL.policies
    ]
    return Report(SMALL, workload(), saturation, tuple(outcomes), real_time=False)


def test_the_working_set_is_one_and_a_half_kv_caches() -> None:
    assert workload().working_set_tokens == pytest.approx(30_000, rel=0.05)
    assert len(workload().prompts) == SMALL.calls


def test_ours_recomputes_less_than_half_of_what_round_robin_does() -> None:
    round_robin, _, ours = report().outcomes
    assert ours.prompt_tokens == round_robin.prompt_tokens
    assert ours.computed_tokens <= 0.5 * round_robin.computed_tokens
    assert round_robin.calls_per_engine == {f"engine-{i}": 75 for i in range(4)}
    assert sum(ours.calls_per_engine.values()) == SMALL.calls


def test_saturation_is_what_round_robin_completes_under_a_backlog() -> None:
    records = simulate(SMALL, workload(), "round_robin", None, quiet)
    assert {record.arrived_s for record in records} == {0.0}
    assert report().saturation_per_s == SMALL.calls / max(record.finished_s for record in records)


def test_the_json_report_carries_inputs_outcomes_and_claims() -> None:
    decoded = msgspec.json.decode(report().json())
    assert decoded["experiment"]["seed"] == SMALL.seed
    assert decoded["experiment"]["traces"] == "built-in"
    assert decoded["kv_tokens"] == 20_000
    assert [outcome["policy"] for outcome in decoded["outcomes"]] == ["round_robin", "e2", "plait"]
    assert {"name", "value", "target", "holds"} == set(decoded["claims"][0])


def test_the_table_shows_every_policy_and_the_inputs() -> None:
    text = report().text()
    for expected in ("round_robin", "e2", "plait", "seed 1", "20,000 tokens", "300 calls", "hit rate", "virtual time"):
        assert expected in text


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown placement policy 'e3'; expected any of plait, e2"):
        Experiment(policies=("e2", "e3"))


def test_summary_by_hand() -> None:
    def record(engine_id: str, cached: int, predicted: int, e2e_s: float) -> CallRecord:
        made = CallRecord("p", 100, 5, 1.0, "", engine_id, PlacementReason.EXPLOIT, predicted)
        made.cached_tokens, made.first_token_s, made.finished_s = cached, 1.5, 1.0 + e2e_s
        return made

    outcome = summarise("e2", [record("a", 50, 64, 2.0), record("b", 0, 0, 4.0)])
    assert (outcome.prompt_tokens, outcome.computed_tokens, outcome.hit_rate) == (200, 150, 0.25)
    assert outcome.misprediction == pytest.approx(14 / 200)
    assert (outcome.ttft_mean_s, outcome.e2e_mean_s, outcome.e2e_p99_s) == (0.5, 3.0, 4.0)
    assert outcome.calls_per_engine == {"a": 1, "b": 1}


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_percentile_is_the_nearest_rank(share: float, expected: float) -> None:
    assert percentile([float(i) for i in range(100, 0, -1)], share) == expected
