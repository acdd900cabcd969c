"""Engines beside the fleet's, started at the same time, because an engine takes long to start.

SGLang's suite has one whose plugin cannot load: vLLM does not start without a scheduler that it was told to use. And it
has a vLLM engine that serves the model together with one of the fleet's: a gateway places calls on both, and knows what
both have cached. vLLM's suite has an engine for vectors: SGLang's scores and ranks take other fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.real_engines.calls import send_singly, workload
from e2e.real_engines.engine import KV_TOKENS, MODEL, EngineKind, RealEngine, started
from e2e.real_engines.environment import ROOT
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.real_engines.reference import Reference
from e2e.real_engines.tapped import Tapped, tapped
from e2e.server_process import eventually
from e2e.sglang.engines import unloadable_engine
from e2e.vllm import engines as vllm
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

VLLM_PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
WHY: Final = "nonsense"
MIXED_CALLS: Final = 40
TEXTS: Final = ["the sky is blue", "grass is green"]
VECTORS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "vectors": ("/v1/embeddings", {"input": TEXTS}),
    "vectors in base64": ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}),
    "scores": ("/v1/score", {"text_1": "what is blue?", "text_2": TEXTS}),
    "ranks": ("/v1/rerank", {"query": "what is blue?", "documents": TEXTS}),
    "tokens": ("/tokenize", {"prompt": "Say hi."}),
}


@pytest.fixture(scope="module")
def engines(
    kind: EngineKind, reference: Reference, python: Path, model: Path, folder: Path
) -> Iterator[dict[str, RealEngine]]:
    """By name, once the engines of `reference` have stopped."""
    engines: dict[str, RealEngine] = {}
    if kind.name == "vllm":
        engines["vectors"] = kind.stock("vectors", python, model, folder)
        engines["vectors"].add_flags(kind.embedding)
    else:
        engines["broken"] = unloadable_engine("broken", python, model, folder, scheduler=WHY)
        engines["broken"].may_log_tracebacks = True  # SGLang logs why the plugin did not load
        if VLLM_PYTHON.exists():
            engines["other"] = vllm.plait_engine("other", VLLM_PYTHON, model, folder)
    with started(engines.values()):
        yield engines


def test_a_plugin_that_does_not_load_is_seen(engines: dict[str, RealEngine], model: Path, folder: Path) -> None:
    """Its engine is used as any other, and three places say so."""
    if "broken" not in engines:
        pytest.skip("vLLM does not start without a scheduler that it was told to use")
    gateway = new_gateway("gateway-broken", {"broken": engines["broken"]}, model, folder)
    with ExitStack() as stack:
        gateway.start()
        stack.callback(gateway.stop)
        gateway.wait_until_ready()
        eventually(lambda: "degraded" in gateway.get("/ready").json())
        assert WHY in gateway.get("/ready").json()["degraded"]["broken"]
        assert gateway.metric("plait_engine_degraded", engine="broken") == 1
        assert "cache-state report refused" in gateway.log()
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
        answer = gateway.post("/v1/completions", json=body, headers={"plait-slo-ttft-ms": "1000"})
        assert answer.status_code == 200


@pytest.fixture(scope="module")
def mixed(
    kind: EngineKind, fleet: EngineFleet, engines: dict[str, RealEngine], model: Path, folder: Path
) -> Iterator[EngineFleet]:
    """One of the fleet's engines and vLLM's, behind a gateway of their own."""
    if kind.name == "vllm":
        pytest.skip("`make e2e-sglang` tests it")
    if "other" not in engines:
        pytest.skip("`make e2e-vllm` builds vLLM's environment")
    both = {"engine-1": fleet.engines["engine-1"], "other": engines["other"]}
    with ExitStack() as stack:
        mixed = EngineFleet(new_gateway("gateway-mixed", both, model, folder), both)
        mixed.start_gateway(stack)
        yield mixed


def test_calls_go_to_both_and_find_what_was_predicted(mixed: EngineFleet, kind: EngineKind) -> None:
    """The two kinds write tools into a prompt in different forms, so that a prediction of these calls is a guess."""
    mixed.settle()
    calls = workload(None, KV_TOKENS, MIXED_CALLS, seed=5, sizes=kind.documents)
    answers = send_singly(mixed.gateway, calls, before_each=mixed.settle)
    assert {answer.engine for answer in answers} == set(mixed.engines)
    for name in mixed.engines:
        assert any(answer.cached_tokens > 0 for answer in answers if answer.engine == name)
    plain = [answer for call, answer in zip(calls, answers, strict=True) if not call.tools]
    assert len(plain) >= 0.75 * MIXED_CALLS
    assert sum(answer.was_predicted for answer in plain) >= 0.97 * len(plain)
    assert all(answer.predicted_tokens <= answer.cached_tokens + TREE_BLOCK_TOKENS for answer in answers)


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


@pytest.fixture(scope="module")
def vectors(engines: dict[str, RealEngine], model: Path, folder: Path) -> Iterator[Tapped]:
    if "vectors" not in engines:
        pytest.skip("vLLM's routes")
    with ExitStack() as stack:
        yield tapped(stack, engines["vectors"], model, folder, "tapped-vectors")


@pytest.mark.parametrize("request_", VECTORS)
def test_the_client_gets_the_engines_vectors_and_what_is_made_of_them(vectors: Tapped, request_: str) -> None:
    vectors.check(*VECTORS[request_])
