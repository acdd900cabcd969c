"""A get that comes while its call runs in a real engine: the engine's scheduler gets the call's new objectives."""

from __future__ import annotations

from typing import Any

from e2e.real_engines.engine import MODEL, RealEngine
from e2e.real_engines.fleet import EngineFleet
from e2e.server_process import eventually

OUTPUT_TOKENS = 400


def test_a_later_get_changes_the_objectives_of_a_running_call(fleet: EngineFleet) -> None:
    gateway, before = fleet.gateway, told(fleet)
    assert all(report(engine)["scheduler"]["takes_objectives"] for engine in fleet.engines.values())
    placeholders = [{"name": "answer", "in_out": True}]
    body = {"session_id": "later", "model": MODEL, "prompt": "Count to a thousand. {{answer}}"}
    more = {"placeholders": placeholders, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    assert gateway.post("/v1/submit", json=body | more).status_code == 200
    eventually(lambda: running(fleet) == 1)
    got = gateway.post("/v1/get", json={"session_id": "later", "semantic_var_id": "answer", "criteria": "latency"})
    assert got.json()["state"] == "set"
    assert told(fleet) == before + 1
    assert gateway.metric("plait_slo_calls_total", objective="latency", slo="tpot") >= 1


def told(fleet: EngineFleet) -> float:
    return fleet.gateway.metric("plait_changed_objectives_total", told="yes")


def running(fleet: EngineFleet) -> int:
    return sum(report(engine)["queue"]["running"] for engine in fleet.engines.values())


def report(engine: RealEngine) -> dict[str, Any]:
    found: dict[str, Any] = engine.get("/cache_state").json()
    return found
