from __future__ import annotations

from backends.embedded.engine import Engine, EngineSettings
from gateway.metrics import Metrics
from gateway.router import CallUsage, Router
from policy.cost_model import CostModel, LongAttention, PiecewiseLinear
from policy.types import Call
from tests.gateway.session_calls import Core

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
LABELS = 'engine="a",model="m"'


def samples(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_predicted_and_reported_cache_hits_are_counted_where_both_are_known() -> None:
    router = Router()
    router.add_engine("a", COSTS)
    router.engine_answered("a", {"m": None})
    metrics = Metrics(router)
    # Expected are nothing, then the first call's block, then both; found are 0, 128, it does not say, and 0.
    for hashes, cached in (([1], 0), ([1, 2], 128), ([1, 2], None), ([1, 2], 0)):
        call = Call("c", "m", 64 * len(hashes) + 1, 64, hashes)
        booking = router.book(call, router.select(call), 10.0)
        metrics.placed(booking)
        if cached is not None:
            router.first_token(booking, 10.5)
        metrics.ended(booking, "ok", CallUsage(call.prompt_tokens, 5, cached), 9.0, 12.0)
    metrics.ended(booking, "client_gone", None, 9.0, 99.0)
    metrics.tried_again("m", "a")
    found = samples(metrics)
    assert found[f"plait_cached_tokens_predicted_total{{{LABELS}}}"] == 0 + 64 + 128
    assert found[f"plait_cached_tokens_reported_total{{{LABELS}}}"] == 0 + 128 + 0
    assert found[f"plait_cached_tokens_mispredicted_total{{{LABELS}}}"] == 0 + 64 + 128
    assert found[f"plait_prompt_tokens_total{{{LABELS}}}"] == 65 + 3 * 129
    assert found[f"plait_output_tokens_total{{{LABELS}}}"] == 20
    assert found[f'plait_calls_total{{{LABELS},outcome="ok"}}'] == 4
    assert found[f'plait_calls_total{{{LABELS},outcome="client_gone"}}'] == 1
    assert found[f'plait_placements_total{{{LABELS},reason="explore"}}'] == 2
    assert found[f"plait_retries_total{{{LABELS}}}"] == 1
    assert found[f"plait_ttft_seconds_sum{{{LABELS}}}"] == 4 * 1.5
    assert found[f"plait_e2e_seconds_sum{{{LABELS}}}"] == 4 * 3.0


def test_an_engines_own_figures_are_shown_once_it_reports_them() -> None:
    router = Router()
    router.add_engine("a", COSTS)
    metrics = Metrics(router)
    assert "plait_engine_waiting_calls{" not in metrics.text().decode()
    engine = Engine(EngineSettings(name="a", model="m", kv_tokens=1024), COSTS)
    router.report("a", engine.cache_state(), requested_s=0.0)
    text = metrics.text().decode()
    for line in ("waiting_calls", "running_calls", "queue_seconds", "iteration_seconds", "preemptions"):
        assert f'plait_engine_{line}{{engine="a"}} 0.0' in text
    assert 'plait_engine_kv_tokens{engine="a"} 1024.0' in text
    assert 'plait_engine_kv_free_tokens{engine="a"} 1024.0' in text
    assert 'plait_engine_reports{engine="a"} 1.0' in text
    router.no_reports("a")
    assert "plait_engine_kv_tokens{" not in metrics.text().decode()


def test_sessions_are_shown_as_they_are() -> None:
    core = Core()
    metrics = Metrics(Router(), core.executor)
    core.add("B", "a", ["b"], held_bytes=100)
    core.executor.set_value(core.session("other"), "x", "é", 0.0)
    core.executor.fail(core.add("C", outputs=["c"]), "no", 0.0)
    metrics.held(0.2)
    found = samples(metrics)
    assert (found["plait_sessions"], found["plait_held_calls"], found["plait_semantic_variables"]) == (2, 1, 4)
    assert found["plait_held_bytes"] == 102
    assert (found['plait_variables_total{state="set"}'], found['plait_variables_total{state="failed"}']) == (1, 1)
    assert (found["plait_hold_seconds_count"], found["plait_hold_seconds_sum"]) == (1, 0.2)
