"""Engines that are started in other ways than the fleet's, at the same time, because an engine takes long to start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.installed import clashing_folder, copied_environment
from e2e.real_engines.engine import MODEL, EngineKind, RealEngine, started
from e2e.real_engines.fleet import new_gateway
from e2e.real_engines.reference import Reference
from e2e.real_engines.tapped import Tapped, tapped
from e2e.servers import eventually
from e2e.sglang.engines import unloadable_engine

VISIBLE_S: Final = 5.0
WHY: Final = "nonsense"
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
    kind: EngineKind, reference: Reference, python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RealEngine]]:
    """By name, once the engines of `reference` have stopped: one with Plait's wheel, and one of the kind's own.

    SGLang's has a plugin that cannot load: vLLM does not start without a scheduler that it was told to use. vLLM's
    serves the tiny model for its vectors: SGLang's scores and ranks take other fields.
    """
    folder = clashing_folder(tmp_path_factory.mktemp("other"))
    copied = copied_environment(python, folder / "environment")
    engines = {"installed": kind.plait("installed", copied, model, folder, options=("--scheduler", "hit_ratio"))}
    if kind.name == "sglang":
        engines["broken"] = unloadable_engine("broken", python, model, folder, scheduler=WHY)
        engines["broken"].may_log_tracebacks = True  # SGLang logs why the plugin did not load
    else:
        engines["vectors"] = kind.stock("vectors", python, model, folder)
        engines["vectors"].add_flags(kind.embedding)
    with started(engines.values()):
        yield engines


def test_the_adapter_runs_beside_distributions_and_files_of_its_folders_names(engines: dict[str, RealEngine]) -> None:
    engine = engines["installed"]
    answer = engine.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "max_tokens": 2})
    assert answer.status_code == 200
    assert engine.cache_state().scheduler.policy == "hit_ratio"


def test_a_plugin_that_does_not_load_is_seen(engines: dict[str, RealEngine], model: Path, folder: Path) -> None:
    """Its engine is used as any other, and three places say so."""
    if "broken" not in engines:
        pytest.skip("vLLM does not start without a scheduler that it was told to use")
    gateway = new_gateway("gateway-broken", {"broken": engines["broken"]}, model, folder)
    with ExitStack() as stack:
        gateway.start()
        stack.callback(gateway.stop)
        gateway.wait_until_ready()
        began_s = time.monotonic()
        eventually(lambda: "degraded" in gateway.get("/ready").json())
        assert time.monotonic() - began_s < VISIBLE_S
        assert WHY in gateway.get("/ready").json()["degraded"]["broken"]
        assert gateway.metric("plait_engine_degraded", engine="broken") == 1
        assert "cache-state report refused" in gateway.log()
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
        answer = gateway.post("/v1/completions", json=body, headers={"plait-slo-ttft-ms": "1000"})
        assert answer.status_code == 200


@pytest.fixture(scope="module")
def vectors(engines: dict[str, RealEngine], model: Path, folder: Path) -> Iterator[Tapped]:
    if "vectors" not in engines:
        pytest.skip("vLLM's routes")
    with ExitStack() as stack:
        yield tapped(stack, engines["vectors"], model, folder, "tapped-vectors")


@pytest.mark.parametrize("request_", VECTORS)
def test_the_client_gets_the_engines_vectors_and_what_is_made_of_them(vectors: Tapped, request_: str) -> None:
    vectors.check(*VECTORS[request_])
