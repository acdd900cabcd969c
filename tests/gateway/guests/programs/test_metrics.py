from __future__ import annotations

from plait.gateway.guests.programs.metrics import ProgramMetrics, SessionCollector
from plait.gateway.metrics import new_registry
from tests.gateway.exposed import samples
from tests.gateway.guests.programs.chained_gateway import served_calls
from tests.gateway.guests.programs.core.session_calls import Core


def test_sessions_are_shown_as_they_are() -> None:
    core = Core()
    registry = new_registry()
    registry.register(SessionCollector(core.executor.sessions, core.executor.variables.counts))
    metrics = ProgramMetrics(registry)
    core.add("B", "a", ["b"], held_bytes=100)
    core.executor.variables.set_value(core.session("other"), "x", "é", 0.0)
    core.executor.fail(core.add("C", outputs=["c"]), "no", 0.0)
    metrics.held(0.2)
    metrics.tried_again("m", "a")
    found = samples(registry)
    assert (found["plait_program_sessions"], found["plait_held_calls"], found["plait_semantic_variables"]) == (2, 1, 4)
    assert found["plait_held_bytes"] == 102
    assert (found["plait_recorded_answer_bytes"], found["plait_deleted_sessions"]) == (0, 0)
    assert found['plait_sessions_evicted_total{needed="bytes"}'] == 0
    assert (found['plait_variables_total{state="set"}'], found['plait_variables_total{state="failed"}']) == (1, 1)
    assert (found["plait_hold_seconds_count"], found["plait_hold_seconds_sum"]) == (1, 0.2)
    assert found['plait_calls_restarted_total{engine="a",model="m"}'] == 1


async def test_the_time_of_a_job_counts_from_its_first_call_to_the_value() -> None:
    async with served_calls() as served:
        await served.chat("Write", output="code")
        await served.chat("Test {{code}}", inputs="code", output="test")
        waiting = await served.get("test", criteria={"slo_jct_ms": 1e6})
        await served.engine.answer("Write", "x = 1")
        await served.engine.answer("Test x = 1", "fine")
        assert waiting.json["value"] == "fine"
        await served.get("test")
        found = samples(served.registry)
        assert found['plait_jct_seconds_count{objective="times"}'] == 1, "the second get did not wait"
        jobs = {name: n for name, n in found.items() if name.startswith('plait_slo_jobs_total{met="yes"')}
        assert list(jobs.values()) == [1]
        (tenant,) = served.executor.sessions.tenants
        assert list(jobs) == [f'plait_slo_jobs_total{{met="yes",tenant="{tenant[:8]}"}}']
