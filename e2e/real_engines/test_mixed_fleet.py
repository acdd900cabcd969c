"""One model served by an engine of each kind: a gateway places calls on both, and knows what both have cached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from e2e.real_engines.calls import send_singly, workload
from e2e.real_engines.engine import KV_TOKENS, EngineKind, started
from e2e.real_engines.environment import ROOT
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.vllm import engines as vllm

CALLS: Final = 40


@pytest.fixture(scope="module")
def mixed(kind: EngineKind, fleet: EngineFleet, model: Path, folder: Path) -> Iterator[EngineFleet]:
    """One of the fleet's engines, and a vLLM engine beside it, behind a gateway of their own."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    if kind.name == "vllm":
        pytest.skip("`make e2e-sglang` tests it")
    if not python.exists():
        pytest.skip("`make e2e-vllm` builds vLLM's environment")
    other = vllm.plait_engine("other", python, model, folder)
    engines = {"engine-1": fleet.engines["engine-1"], "other": other}
    with started([other]), ExitStack() as stack:
        both = EngineFleet(new_gateway("gateway-mixed", engines, model, folder), engines)
        both.start_gateway(stack)
        yield both


def test_calls_go_to_both_and_find_what_was_predicted(mixed: EngineFleet, kind: EngineKind) -> None:
    mixed.settle()
    calls = workload(None, KV_TOKENS, CALLS, seed=5, sizes=kind.documents)
    answers = send_singly(mixed.gateway, calls, before_each=mixed.settle)
    assert {answer.engine for answer in answers} == set(mixed.engines)
    for name in mixed.engines:
        assert any(answer.cached_tokens > 0 for answer in answers if answer.engine == name)
    assert sum(answer.was_predicted for answer in answers) >= 0.97 * CALLS


def test_both_take_objectives(mixed: EngineFleet) -> None:
    """Objectives that are met: each engine's attainment rises, if it is not 1."""
    before = {name: engine.cache_state().scheduler.slo_attainment or 0.0 for name, engine in mixed.engines.items()}
    headers = {"plait-slo-ttft-ms": "60000", "plait-slo-tpot-ms": "60000"}
    for number in range(8):
        body = {"model": "tiny", "prompt": [200 + number, *range(10, 600)], "max_tokens": 4}
        assert mixed.gateway.post("/v1/completions", json=body, headers=headers).status_code == 200
    for name, engine in mixed.engines.items():
        attainment = engine.cache_state().scheduler.slo_attainment
        assert attainment is not None
        assert attainment == 1.0 or attainment > before[name], name
