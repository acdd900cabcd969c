from __future__ import annotations

import pytest

from plait.gateway.fleet.metrics import FleetCollector
from plait.gateway.fleet.router import Router
from plait.gateway.metrics import new_registry
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from tests.gateway.exposed import exposed_text, samples
from tests.gateway.fleet.lettered_prompts import new_router, report

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())


def test_an_engines_own_figures_are_shown_once_it_reports_them() -> None:
    router = Router()
    router.add_engine("a", COSTS)
    registry = new_registry()
    registry.register(FleetCollector(router))
    assert "plait_engine_waiting_calls{" not in exposed_text(registry)
    engine = Engine(EngineSettings(name="a", model="m", kv_tokens=1024, max_running_calls=8), COSTS)
    router.report("a", engine.cache_state(), requested_s=0.0)
    text = exposed_text(registry)
    for line in ("waiting_calls", "running_calls", "queue_seconds", "iteration_seconds", "preemptions"):
        assert f'plait_engine_{line}{{engine="a"}} 0.0' in text
    assert 'plait_engine_slots{engine="a"} 8.0' in text
    assert 'plait_engine_kv_tokens{engine="a"} 1024.0' in text
    assert 'plait_engine_kv_free_tokens{engine="a"} 1024.0' in text
    assert 'plait_engine_reports{engine="a"} 1.0' in text
    router.no_reports("a")
    assert "plait_engine_kv_tokens{" not in exposed_text(registry)


def test_a_figure_that_an_older_adapter_leaves_out_is_not_shown() -> None:
    router = new_router("a")
    registry = new_registry()
    registry.register(FleetCollector(router))
    router.report("a", report(snapshot=True), requested_s=0.0)
    text = exposed_text(registry)
    assert 'plait_engine_running_calls{engine="a"} 0.0' in text
    assert "plait_engine_slots{" not in text


def test_an_engine_that_is_slower_than_the_others() -> None:
    router, registry = Router(), new_registry()
    registry.register(FleetCollector(router))
    for engine_id, ratio in (("a", 1.0), ("b", 1.0), ("c", 3.0)):
        router.add_engine(engine_id, COSTS)
        router.engines[engine_id].view.pace.observe(ratio * 100.0, 100.0, 10.0)
    for engine in router.engines.values():
        engine.view.refresh(10.0)
    found = samples(registry)
    slowness = [found[f'plait_engine_slowness{{engine="{engine_id}"}}'] for engine_id in "abc"]
    assert slowness == pytest.approx([1.0, 1.0, 3.0], rel=0.05)
