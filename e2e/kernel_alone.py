"""A gateway of the kernel and some guests: `python -m e2e.kernel_alone URL GUEST[,GUEST...] PATH...`.

The script sends calls to an engine, and prints the status of each by its name, and of a POST to each path, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

import httpx

from plait.gateway.app import Gateway
from plait.gateway.config.file import parse_config
from plait.gateway.server.request_bounds import RequestLimits
from tests.gateway.server.serving import serving

MESSAGES: Final = [{"role": "user", "content": "How does a gateway place calls?"}]
CHAT: Final[dict[str, Any]] = {"model": "demo", "messages": MESSAGES, "max_tokens": 8}
CALLS: Final[dict[str, tuple[str, dict[str, Any], dict[str, str]]]] = {
    "chat": ("/v1/chat/completions", CHAT, {}),
    "stream": ("/v1/chat/completions", {**CHAT, "stream": True}, {}),
    "text": ("/v1/completions", {"model": "demo", "prompt": "A gateway", "max_tokens": 8}, {}),
    "embeddings": ("/v1/embeddings", {"model": "demo", "input": "A gateway"}, {}),
    "promise": ("/v1/chat/completions", {**CHAT, "stream": True}, {"plait-slo-ttft-ms": "2000"}),
    "session": ("/v1/chat/completions", CHAT, {"plait-session": "s"}),
    "tier": ("/v1/chat/completions", {**CHAT, "service_tier": "priority"}, {}),
    "unknown model": ("/v1/chat/completions", {**CHAT, "model": "none"}, {}),
    "too many": ("/v1/chat/completions", CHAT, {"x-api-key": "poor"}),
    "a wrong key": ("/v1/chat/completions", CHAT, {"x-api-key": "none"}),
}
REFUSED: Final = {"unknown model": 404, "too many": 429, "a wrong key": 401}
"""By name of a call: its status, where that is not 200."""


async def main(engine: str, guests: Sequence[str], paths: Sequence[str]) -> dict[str, int]:
    """Serve, and send the calls."""
    given = {
        "server": {"admin_key": "admin"},
        "models": [{"name": "demo", "tokenizer": "embedded"}],
        "engines": [{"name": "e", "url": engine}],
        "tenants": [
            {"name": "rich", "api_keys": ["rich"]},
            {"name": "poor", "api_keys": ["poor"], "calls_per_s": 0.001},
        ],
    }
    gateway = Gateway(parse_config(given, "kernel"), guests=guests)
    asked = CALLS | {path: (path, CHAT, {"x-api-key": "admin" if "admin" in path else "rich"}) for path in paths}
    async with (
        gateway.running(),
        serving(RequestLimits(), application=gateway.app) as running,
        httpx.AsyncClient(base_url=running.url, trust_env=False) as client,
    ):
        while not gateway.kernel.router.models.names:  # noqa: ASYNC110 - until the engine has answered
            await asyncio.sleep(0.01)
        statuses = {}
        for name, (path, body, headers) in asked.items():
            for _ in range(2 if name == "too many" else 1):
                answer = await client.post(path, json=body, headers={"x-api-key": "rich", **headers})
            statuses[name] = answer.status_code
    return statuses


if __name__ == "__main__":
    _, url, named, *others = sys.argv
    found = asyncio.run(main(url, named.split(",") if named else (), others))
    sys.stdout.write("\n" + json.dumps(found))
