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
from tests.waiting import SLOWNESS, WITHIN_S

ADMIN_KEY = "sk-admin"
BUSY_TOKENS = round(590 * SLOWNESS)
"""Each engine is busy for some fifteen seconds with the answer before. Calls that wait for ten are told so."""
HELD = 4


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    """Two engines with one slot each."""
    with Launcher(tmp_path) as launch:
        engines = [launch.engine(name, time_scale=1, options=["--max-running-calls", "1"]) for name in ("a", "b")]
        held = {"hold_s": 60 * SLOWNESS}  # a call without a stream is told to come back after that
        gateway = launch.gateway(engines, server={"admin_key": ADMIN_KEY}, admission=held)
        fleet = Fleet(gateway, {engine.name: engine for engine in engines})
        fleet.start()
        yield fleet


async def ask(http: httpx.AsyncClient, text: str, begun: asyncio.Event, **fields: Any) -> tuple[int, str]:
    """The status and text of an answer. It has `begun` with the first part."""
    async with http.stream("POST", "/v1/chat/completions", json=asking(text, **fields)) as response:
        whole = ""
        async for part in response.aiter_text():
            whole += part
            begun.set()
        return response.status_code, whole


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
    async with httpx.AsyncClient(base_url=gateway.url, verify=NO_TLS, timeout=WITHIN_S) as http:
        long = {"max_tokens": BUSY_TOKENS, "stream": True, "ignore_eos": True}
        began, told = ([asyncio.Event() for _ in range(count)] for count in (2, HELD))
        busy = [asyncio.create_task(ask(http, f"busy {number}", event, **long)) for number, event in enumerate(began)]
        await asyncio.gather(*(event.wait() for event in began))
        streams = [
            asyncio.create_task(ask(http, f"stream {number}", event, stream=True)) for number, event in enumerate(told)
        ]
        whole = [asyncio.create_task(ask(http, f"whole {number}", asyncio.Event())) for number in range(HELD)]
        await asyncio.gather(*(event.wait() for event in told))
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
