"""A tenant is the same after a restart: its label in the metrics, and its cache salt in the engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from e2e.server_process import Server
from e2e.servers import Fleet, Launcher

KEY = "a-key-that-nobody-may-read"
PROMPT = {"model": "demo", "prompt": "A document with a length. " * 60, "max_tokens": 1}


def cached_tokens(gateway: Server, key: str) -> int:
    """Of a call with a TTFT, so that it counts for its tenant."""
    headers = {"authorization": f"Bearer {key}", "plait-slo-ttft-ms": "60000"}
    answer = gateway.post("/v1/completions", json=PROMPT, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_is_the_same_after_a_restart(launch: Launcher) -> None:
    engine = launch.engine("demo-1")
    tenants: list[Mapping[str, Any]] = [{"name": "blue", "api_keys": ["blue-key"]}]
    gateway = launch.gateway([engine], server={"api_keys": [KEY], "isolate_tenants": True}, tenants=tenants)
    Fleet(gateway, {engine.name: engine}).start()
    labels = []
    for is_restarted in (False, True):
        if is_restarted:
            gateway.stop()
            gateway.start()
            gateway.wait_until_ready()
        for key in (KEY, "blue-key"):
            assert (cached_tokens(gateway, key) > 0) == is_restarted, "a salt of its own, which lasts"
        metrics = gateway.get("/metrics").text
        labels.append({line.split('tenant="')[1].split('"')[0] for line in metrics.splitlines() if 'tenant="' in line})
        assert not [key for key in (KEY, "blue-key") if key in metrics]
    assert labels[0] == labels[1]
    (digits,) = labels[0] - {"blue"}
    assert len(digits) == 8 == len(f"{int(digits, 16):08x}")
    logged = gateway.log()
    assert not [key for key in (KEY, "blue-key") if key in logged]
    calls = [json.loads(line) for line in logged.splitlines() if '"event":"call"' in line]
    assert {call["tenant"] for call in calls} == {"blue", digits}
    secret = gateway.log_path.with_name("plait.secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().strip() not in logged
