"""A plugin that does not load: its engine is used as any other, and three places say so."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from e2e.real_engines.engine import MODEL, EngineKind, started
from e2e.real_engines.fleet import new_gateway
from e2e.real_engines.reference import Reference
from e2e.servers import eventually
from e2e.sglang.engines import unloadable_engine

VISIBLE_S: Final = 5.0
WHY: Final = "nonsense"


def test_a_plugin_that_does_not_load_is_seen(
    kind: EngineKind, reference: Reference, python: Path, model: Path, folder: Path
) -> None:
    if kind.name == "vllm":
        pytest.skip("vLLM does not start without a scheduler that it was told to use")
    engine = unloadable_engine("broken", python, model, folder, scheduler=WHY)
    engine.may_log_tracebacks = True  # SGLang logs why the plugin did not load
    gateway = new_gateway("gateway-broken", {"broken": engine}, model, folder)
    with started([engine]), ExitStack() as stack:
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
