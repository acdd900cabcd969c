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
from tests.test_kernel import STILL_SHARED

SHARED: Final = {file.removesuffix(".py") for file in STILL_SHARED}
ROOMS: Final = {file.rpartition("/")[0] for file in SHARED}
"""Rooms of which a file is shared: their own `__init__`, which is empty, is imported first."""
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
    "responses": ("/v1/responses", {"model": "demo", "input": "Hi"}, {}),
}


class NoGuests(MetaPathFinder):
    """Refuses to import the rooms of guests."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: the next finder has it."""
        name = fullname.removeprefix("plait.").replace(".", "/")
        if fullname.startswith("plait.") and name.startswith(GUESTS) and name not in SHARED | ROOMS:
            raise ImportError(f"{fullname} is a guest's")
        return None


async def main(engine: str) -> None:
    """Serve the kernel, and send it the calls."""
    from starlette.applications import Starlette  # noqa: PLC0415 - after the finder is in place, as those below

    from plait.gateway.admission.tenants import TenantIds  # noqa: PLC0415
    from plait.gateway.api.call_api import CallApi  # noqa: PLC0415
    from plait.gateway.config.file import parse_config  # noqa: PLC0415
    from plait.gateway.kernel import Kernel  # noqa: PLC0415
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
    kernel = Kernel(parse_config(given, "kernel"), TenantIds(b"s" * 32))
    app = CallApi(kernel.completions(), {}, kernel.keys, kernel.bodies, kernel.refusals, Starlette())
    kernel.open()
    async with (
        serving(RequestLimits(), application=app) as running,
        httpx.AsyncClient(base_url=running.url, trust_env=False) as client,
    ):
        while not kernel.router.models.names:  # noqa: ASYNC110 - until the engine has answered
            await asyncio.sleep(0.01)
        statuses = {}
        for name, (path, body, headers) in CALLS.items():
            for _ in range(2 if name == "too many" else 1):
                answer = await client.post(path, json=body, headers={"x-api-key": "rich", **headers})
            statuses[name] = answer.status_code
    await kernel.close()
    sys.stdout.write("\n" + json.dumps(statuses))


if __name__ == "__main__":
    sys.meta_path.insert(0, NoGuests())
    asyncio.run(main(sys.argv[1]))
