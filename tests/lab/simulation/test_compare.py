"""`plait demo --compare` in virtual time: its figures, its report, and that its claims hold."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest

from plait.backends.profiles import load_profile
from plait.gateway.cli import parse
from plait.lab.commands.demo import compared
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.simulation import compare
from plait.lab.simulation.compare import (
    Experiment,
    Report,
    Workload,
    after_warm_up,
    percentile,
    prepare,
    saturation_rate,
    simulate,
    summarise,
)
from plait.lab.simulation.simulate import CallRecord
from plait.policy.costs.cost_model import CostModel
from plait.policy.types import PlacementReason

SMALL = Experiment(calls=300, kv_tokens=20_000, turns=3)
SINGLE = replace(SMALL, turns=None)


def quiet(_label: str, _done: int, _total: int) -> None:
    pass


@lru_cache
def workload(experiment: Experiment = SMALL) -> Workload:
    return prepare(experiment, quiet)


@lru_cache
def report() -> Report:
    return compared(SMALL, None)


def test_the_working_set_is_one_and_a_half_kv_caches() -> None:
    assert workload().working_set_tokens == pytest.approx(30_000, rel=0.05)
    assert len(workload().prompts) == SMALL.calls


def test_ours_recomputes_less_than_half_of_what_least_outstanding_does() -> None:
    ours, least, *_ = report().outcomes
    assert ours.prompt_tokens == least.prompt_tokens
    assert ours.computed_tokens <= 0.5 * least.computed_tokens
    assert sum(ours.calls_per_engine.values()) == ours.calls == 0.75 * SMALL.calls


@pytest.mark.parametrize("ahead", [0, 1])
def test_engines_plan_ahead_as_their_profile_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    started: list[int] = []

    def engine(settings: EngineSettings, costs: CostModel) -> Engine:
        started.append(settings.ahead)
        return Engine(settings, costs)

    monkeypatch.setattr(compare, "Engine", engine)
    path = tmp_path / "mine.toml"
    path.write_text(msgspec.structs.replace(load_profile(SINGLE.profile), ahead=ahead).toml(), encoding="utf-8")
    simulate(replace(SINGLE, profile=str(path)), workload(SINGLE), "round_robin", None, quiet)
    assert started == [ahead] * SINGLE.engines


def test_single_calls_arrive_when_they_are_said_to() -> None:
    records = simulate(SINGLE, workload(SINGLE), "round_robin", None, quiet)
    assert {record.arrived_s for record in records} == {0.0}
    saturation_per_s = saturation_rate(SINGLE, workload(SINGLE), quiet)
    assert saturation_per_s == SINGLE.calls / max(record.finished_s for record in records)


def test_a_turn_comes_when_its_client_has_thought_about_the_last_answer() -> None:
    records = simulate(SMALL, workload(), "session_hash", 10.0, quiet)
    for numbers in workload().sessions():
        assert len({records[number].engine_id for number in numbers}) == 1
        for before, after in itertools.pairwise(numbers):
            thought_s = records[after].arrived_s - records[before].finished_s
            assert thought_s == pytest.approx(workload().calls[after].think_s)


def test_the_records_are_in_the_order_of_the_calls() -> None:
    for policy in ("plait", "least_outstanding"):
        records = simulate(SMALL, workload(), policy, 10.0, quiet)
        assert [record.prompt_tokens for record in records] == [prompt.tokens for prompt in workload().prompts]
    assert after_warm_up(records) == records[75:]


def test_a_gateway_that_takes_the_place_of_another_knows_what_engines_have_cached() -> None:
    replaced = replace(SINGLE, replaced_after=150)
    warm, cold = (simulate(one, workload(SINGLE), "plait", 10.0, quiet) for one in (SINGLE, replaced))
    assert warm[:150] == cold[:150]
    of_warm, of_cold = (summarise("plait", records[200:]) for records in (warm, cold))
    assert of_cold.hit_rate >= of_warm.hit_rate - 0.02
    assert of_cold.misprediction < 0.02


def test_the_json_report_carries_inputs_outcomes_and_claims() -> None:
    decoded = msgspec.json.decode(report().json())
    assert decoded["experiment"]["seed"] == SMALL.seed
    assert decoded["experiment"]["traces"] == "built-in"
    assert decoded["kv_tokens"] == 20_000
    assert [outcome["policy"] for outcome in decoded["outcomes"]] == list(SMALL.policies)
    assert {"name", "value", "wanted", "holds"} == set(decoded["claims"][0])


def test_the_table_shows_every_policy_and_the_inputs_in_100_columns() -> None:
    text = report().text()
    policies = ("plait", "least outstanding", "session hash", "sglang-router (cache aware)", "llm-d (score)")
    for expected in (*policies, "seed 1", "20,000 KV tokens", "300 calls", "hit rate", "virtual time"):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_run_without_ours_claims_nothing() -> None:
    assert not list(replace(report(), outcomes=report().outcomes[1:]).claims())


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r'policy = "e3": expected one of "plait", "e2", .*"llmd", or package'):
        Experiment(policies=("e2", "e3"))


def test_real_servers_cannot_run_a_rival() -> None:
    arguments = parse(["demo", "--compare", "--real-time", "--policies=plait,smg"])
    with pytest.raises(ValueError, match="the gateway does not have the policy 'smg'"):
        arguments.run(arguments)


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
