"""An engine with a tier in host memory: what it evicts comes back, and the gateway has said so before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher

KV_TOKENS: Final = 4_096
PROMPT: Final = "Host memory keeps what the accelerator lets go. " * 120
TREE_BLOCK_TOKENS: Final = 64


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Launcher(tmp_path_factory.mktemp("tiers")) as launch:
        options = ["--kv-tokens", str(KV_TOKENS), "--host-kv-tokens", str(16 * KV_TOKENS), "--host-gbps", "10"]
        engine = launch.engine("a", options=options)
        server = launch.gateway([engine], server={"admin_key": "admin"})
        Fleet(server, {"a": engine}).start()
        yield server


def ask(gateway: Server, beginning: str) -> tuple[dict[str, int], int, httpx.Headers]:
    """The usage of an answer, and the cached tokens that were predicted, with the answer's headers."""
    body = {"model": "demo", "messages": [{"role": "user", "content": beginning + PROMPT}], "max_tokens": 4}
    answer = gateway.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return (
        {"prompt": usage["prompt_tokens"], "cached": cached},
        int(answer.headers["plait-cached-tokens"]),
        answer.headers,
    )


def metric(gateway: Server, name: str) -> float:
    lines = gateway.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def test_what_an_engine_has_evicted_comes_back_from_host_memory_as_predicted(gateway: Server) -> None:
    first, predicted, headers = ask(gateway, "0 ")
    assert (first["cached"], predicted) == (0, 0)
    assert "plait-loaded-tokens" not in headers
    assert first["prompt"] > KV_TOKENS // 3
    for number in range(1, 6):
        ask(gateway, f"{number} ")

    def is_in_host_memory() -> bool:
        return metric(gateway, "plait_engine_tier_resident_tokens") >= first["prompt"] - TREE_BLOCK_TOKENS

    eventually(is_in_host_memory)
    again, predicted, headers = ask(gateway, "0 ")
    assert again["cached"] >= first["prompt"] - TREE_BLOCK_TOKENS
    assert abs(predicted - again["cached"]) <= TREE_BLOCK_TOKENS
    tier, _, tokens = headers["plait-loaded-tokens"].partition("=")
    assert tier == "host"
    assert 0 < int(tokens) <= predicted
    assert metric(gateway, "plait_engine_tier_size_tokens") == 16 * KV_TOKENS

    def has_told_its_loads() -> bool:
        return abs(metric(gateway, "plait_engine_loaded_tokens_total") - int(tokens)) <= TREE_BLOCK_TOKENS

    eventually(has_told_its_loads)
    receipt = gateway.get(
        f"/admin/receipts/{headers['x-request-id']}", headers={"authorization": "Bearer admin"}
    ).json()
    attempt = receipt["attempts"][-1]
    assert attempt["predicted_loaded_tokens"] == {"host": int(tokens)}
    assert attempt["predicted_cached_tokens"] == predicted
