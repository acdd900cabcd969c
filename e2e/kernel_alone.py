"""A gateway of the kernel alone: `python -m e2e.kernel_alone URL` sends calls through it to an engine.

Nothing can import a guest's room. It prints the status of each call by its name, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import httpx

from tests.kernel import GUESTS

MESSAGES: Final = [{"role": "user", "content": "How does a gateway place calls?"}]
CHAT: Final[dict[str, Any]] = {"model": "demo", "messages": MESSAGES, "max_tokens": 8}
GUESTS_ROUTES: Final = (
    "/v1/responses", "/v1/messages", "/v1/submit", "/v1/programs", "/v1/sessions", "/v1/audio/transcriptions",
    "/admin/engines", "/admin/explain",
)  # fmt: skip
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
    **{path: (path, CHAT, {}) for path in GUESTS_ROUTES},
}


class NoGuests(MetaPathFinder):
    """Refuses to import the rooms of guests."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: the next finder has it."""
        name = fullname.removeprefix("plait.").replace(".", "/")
        if fullname.startswith("plait.") and name.startswith(GUESTS):
            raise ImportError(f"{fullname} is a guest's")
        return None


async def main(engine: str) -> None:
    """Serve the kernel, and send it the calls."""
    from plait.gateway.app import Gateway  # noqa: PLC0415 - after the finder is in place, as those below
    from plait.gateway.config.file import parse_config  # noqa: PLC0415
    from plait.gateway.server.request_bounds import RequestLimits  # noqa: PLC0415
    from tests.gateway.server.serving import serving  # noqa: PLC0415

    given = {
        "models": [{"name": "demo", "tokenizer": "embedded"}],
        "engines": [{"name": "e", "url": engine}],
        "tenants": [
            {"name": "rich", "api_keys": ["rich"]},
            {"name": "poor", "api_keys": ["poor"], "calls_per_s": 0.001},
        ],
    }
    gateway = Gateway(parse_config(given, "kernel"), guests=())
    kernel = gateway.kernel
    async with (
        gateway.running(),
        serving(RequestLimits(), application=gateway.app) as running,
        httpx.AsyncClient(base_url=running.url, trust_env=False) as client,
    ):
        while not kernel.router.models.names:  # noqa: ASYNC110 - until the engine has answered
            await asyncio.sleep(0.01)
        statuses = {}
        for name, (path, body, headers) in CALLS.items():
            for _ in range(2 if name == "too many" else 1):
                answer = await client.post(path, json=body, headers={"x-api-key": "rich", **headers})
            statuses[name] = answer.status_code
    sys.stdout.write("\n" + json.dumps(statuses))


if __name__ == "__main__":
    sys.meta_path.insert(0, NoGuests())
    asyncio.run(main(sys.argv[1]))
