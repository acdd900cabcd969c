"""Calls that wait for an engine, some of them told so already, while the fleet changes around them."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.sdk import asking
from e2e.server_process import NO_TLS, Server
from e2e.servers import Fleet, Launcher, toml

ADMIN_KEY = "sk-admin"
BUSY_TOKENS = 550
"""Each engine is busy for some fourteen seconds with the answer before."""
TOLD_S = 11.0
HELD = 4


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    """Two engines with one slot each."""
    with Launcher(tmp_path) as launch:
        engines = [launch.engine(name, time_scale=1, options=["--max-running-calls", "1"]) for name in ("a", "b")]
        gateway = launch.gateway(engines, server={"admin_key": ADMIN_KEY})
        fleet = Fleet(gateway, {engine.name: engine for engine in engines})
        fleet.start()
        yield fleet


async def ask(http: httpx.AsyncClient, text: str, **fields: Any) -> tuple[int, str]:
    """The status and text of an answer."""
    async with http.stream("POST", "/v1/chat/completions", json=asking(text, **fields)) as response:
        return response.status_code, "".join([part async for part in response.aiter_text()])


def reload(gateway: Server, config: Path) -> None:
    """Change a tenant's terms in the file, and have it read."""
    config.write_text(config.read_text() + toml({"tenants": [{"name": "new", "api_keys": ["sk-new"]}]}))
    gateway.signal(signal.SIGHUP)


def admin(gateway: Server, method: str, path: str, **options: Any) -> None:
    """Ask the admin API."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    assert gateway.request(method, f"/admin/engines/{path}", headers=headers, **options).is_success


@pytest.mark.parametrize("change", ["reload", "drain", "remove", "remove when drained"])
async def test_held_calls_are_answered(fleet: Fleet, tmp_path: Path, change: str) -> None:
    gateway = fleet.gateway
    async with httpx.AsyncClient(base_url=gateway.url, verify=NO_TLS, timeout=90) as http:
        long = {"max_tokens": BUSY_TOKENS, "stream": True, "ignore_eos": True}
        busy = [asyncio.create_task(ask(http, f"busy {number}", **long)) for number in range(2)]
        await asyncio.sleep(1.0)
        streams = [asyncio.create_task(ask(http, f"stream {number}", stream=True)) for number in range(HELD)]
        whole = [asyncio.create_task(ask(http, f"whole {number}")) for number in range(HELD)]
        await asyncio.sleep(TOLD_S)
        assert not any(task.done() for task in (*busy, *streams, *whole))
        match change:
            case "reload":
                await asyncio.to_thread(reload, gateway, tmp_path / "gateway.toml")
            case "drain":
                await asyncio.to_thread(admin, gateway, "POST", "a", json={"state": "draining"})
            case "remove":
                await asyncio.to_thread(admin, gateway, "DELETE", "a?force=true")
            case _:
                await asyncio.to_thread(admin, gateway, "POST", "a", json={"state": "draining"})
                await asyncio.gather(*busy)
                await asyncio.to_thread(admin, gateway, "DELETE", "a")
        answers = await asyncio.gather(*streams, *whole)
        endings = [text.rstrip().endswith("data: [DONE]") for _, text in await asyncio.gather(*busy)]
    assert [status for status, _ in answers] == [200] * 2 * HELD
    for _, text in answers[:HELD]:
        assert text.startswith(": waiting position=")
        assert '"error":' not in text
        assert text.rstrip().endswith("data: [DONE]")
    assert all('"usage"' in text for _, text in answers[HELD:])
    assert sorted(endings) == ([False, True] if change == "remove" else [True, True])
