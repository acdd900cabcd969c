from __future__ import annotations

from plait.gateway.metrics import new_registry
from plait.gateway.programs.metrics import ProgramMetrics, SessionCollector
from tests.gateway.exposed import samples
from tests.gateway.programs.session_calls import Core


def test_sessions_are_shown_as_they_are() -> None:
    core = Core()
    registry = new_registry()
    registry.register(SessionCollector(core.executor))
    metrics = ProgramMetrics(registry)
    core.add("B", "a", ["b"], held_bytes=100)
    core.executor.variables.set_value(core.session("other"), "x", "é", 0.0)
    core.executor.fail(core.add("C", outputs=["c"]), "no", 0.0)
    metrics.held(0.2)
    metrics.tried_again("m", "a")
    found = samples(registry)
    assert (found["plait_sessions"], found["plait_held_calls"], found["plait_semantic_variables"]) == (2, 1, 4)
    assert found["plait_held_bytes"] == 102
    assert (found['plait_variables_total{state="set"}'], found['plait_variables_total{state="failed"}']) == (1, 1)
    assert (found["plait_hold_seconds_count"], found["plait_hold_seconds_sum"]) == (1, 0.2)
    assert found['plait_calls_restarted_total{engine="a",model="m"}'] == 1
