"""A gateway that was given nothing but the addresses of real engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

import pytest

from e2e.ports import free_port
from e2e.real_engines.engine import MODEL
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet
from e2e.server_process import Server
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

STARTS: Final = 5


@pytest.fixture
def fileless(fleet: EngineFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineFleet]:
    """Another gateway over the fleet's engines, not started yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    port, urls = free_port(), [engine.url for engine in fleet.engines.values()]
    gateway = Server("fileless", port, ["serve", *urls, "--port", str(port)], tmp_path / "log", ready_path="/ready")
    with ExitStack() as stack:
        stack.callback(gateway.stop)
        yield EngineFleet(gateway, {engine.url.removeprefix("http://"): engine for engine in fleet.engines.values()})


def ask(gateway: Server, text: str) -> tuple[int, int]:
    """Predicted and reported cached tokens of a chat."""
    request = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    answer = gateway.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return int(answer.headers["plait-cached-tokens"]), int(details.get("cached_tokens") or 0)


def test_prefixes_are_recognised_without_a_file(fileless: EngineFleet, findings: Findings) -> None:
    ready_s = []
    for number in range(STARTS):
        began_s = time.monotonic()
        fileless.gateway.start()
        fileless.gateway.wait_until_ready()
        ready_s.append(time.monotonic() - began_s)
        text = f"This is number {number}. " + "The quick brown fox jumps over the lazy dog. " * 20
        ask(fileless.gateway, text)
        fileless.settle()
        predicted, reported = ask(fileless.gateway, text)
        engine_block = max(engine.cache_state().block_tokens for engine in fileless.engines.values())
        assert abs(reported - predicted) < max(TREE_BLOCK_TOKENS, engine_block)
        assert predicted >= TREE_BLOCK_TOKENS
        assert fileless.gateway.get("/v1/models").json()["data"][0]["id"] == MODEL
        assert "degraded" not in fileless.gateway.get("/ready").json()
        fileless.gateway.stop()
    findings.figures["a gateway without a file"] = {"ready after, s, median": median(ready_s), "slowest": max(ready_s)}
