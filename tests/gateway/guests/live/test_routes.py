"""The live view's routes: who may see what, and what a stream says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from plait.gateway.app import Gateway
from plait.gateway.config.file import parse_config
from plait.gateway.guests.live.feed import Feed
from plait.gateway.guests.live.routes import PAGE_FILES
from tests.waiting import WITHIN_S

KEY = "an-admin-key"
ENGINES = [{"name": "a", "url": "http://127.0.0.1:1"}]
BEARER = {"authorization": f"Bearer {KEY}"}


def gateway(
    tenants: Sequence[dict[str, Any]] = (),
    store: Mapping[str, str] = MappingProxyType({}),
    receipts: Mapping[str, int] = MappingProxyType({}),
    **server: Any,
) -> Gateway:
    config = {
        "engines": ENGINES, "server": server, "tenants": [*tenants], "store": dict(store), "receipts": dict(receipts)
    }  # fmt: skip
    made = Gateway(parse_config(config, "test"))
    made.kernel.router.health.answered("a", {"m": 1_000})
    return made


def client(made: Gateway, port: int = 80) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(made.app), base_url=f"http://gateway:{port}")


class Watched:
    """A stream, as an ASGI server sees it. The client stops reading after `reads` messages, if that is given."""

    def __init__(self, made: Gateway, key: str = KEY, reads: int | None = None) -> None:
        self.sent: list[Any] = []
        self._gone = asyncio.Event()
        self._reads = reads
        scope = {
            "type": "http", "method": "GET", "path": "/admin/live", "raw_path": b"/admin/live", "query_string": b"",
            "headers": [(b"authorization", f"Bearer {key}".encode())], "server": ("gateway", 80), "scheme": "http",
            "http_version": "1.1", "root_path": "",
        }  # fmt: skip
        self.task: asyncio.Future[None] = asyncio.ensure_future(made.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if len(self.sent) == self._reads:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def until(self, messages: int) -> None:
        async with asyncio.timeout(WITHIN_S):
            while len(self.sent) < messages:  # noqa: ASYNC110 - as a server sees it
                await asyncio.sleep(0.01)

    async def leave(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self.task, WITHIN_S)

    @property
    def events(self) -> list[tuple[str, Any]]:
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        blocks = [block.split("\n") for block in text.split("\n\n") if block]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


@pytest.mark.parametrize("path", ["/admin/live", *PAGE_FILES])
async def test_without_an_admin_key_there_is_nothing(path: str) -> None:
    async with client(gateway()) as http:
        assert (await http.get(path, headers=BEARER)).status_code == 404
        assert (await http.get("/")).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer other"}])
async def test_the_stream_needs_the_key(headers: dict[str, str]) -> None:
    async with client(gateway(admin_key=KEY, api_keys=["other"])) as http:
        assert (await http.get("/admin/live", headers=headers)).status_code == 401


@pytest.mark.parametrize("path", PAGE_FILES)
async def test_the_page_is_static_and_asks_nobody_else(path: str) -> None:
    async with client(gateway(admin_key=KEY)) as http:
        answer = await http.get(path)
    assert answer.status_code == 200
    assert KEY not in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.text.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert "innerHTML" not in answer.text


async def test_the_admin_port_alone_has_them() -> None:
    made = gateway(admin_key=KEY, admin_port=8001)
    async with client(made, 8000) as clients, client(made, 8001) as operators:
        for path in ("/admin/live", *PAGE_FILES):
            assert (await clients.get(path, headers=BEARER)).status_code == 404
        assert (await clients.get("/")).status_code == 200
        assert (await operators.get("/admin/")).status_code == 200
        assert (await operators.get("/")).headers["location"] == "admin/"


async def test_a_stream_has_the_fleet_and_ends_with_its_client() -> None:
    made = gateway(admin_key=KEY)
    watched = Watched(made)
    await watched.until(3)
    name, fleet = watched.events[0]
    assert name == "fleet"
    assert [engine["name"] for engine in fleet["engines"]] == ["a"]
    assert fleet["engine_count"] == 1
    assert (fleet["calls_per_s"], fleet["hit_rate"], fleet["prefixes"]) == (0.0, None, [])
    assert (fleet["held"], fleet["keeps_receipts"]) == ([], True)
    await watched.leave()
    assert made.house[Feed].watchers == 0


async def test_a_stream_says_that_receipts_are_off() -> None:
    watched = Watched(gateway(admin_key=KEY, receipts={"max_bytes": 0}))
    await watched.until(2)
    assert watched.events[0][1]["keeps_receipts"] is False
    await watched.leave()


async def test_streams_end_when_the_gateway_stops_or_the_key_changes() -> None:
    for end in (Gateway.begin_stop, lambda made: made.kernel.admin.keys.replace(["new"])):
        made = gateway(admin_key=KEY)
        watched = Watched(made)
        await watched.until(2)
        end(made)
        await asyncio.wait_for(watched.task, WITHIN_S)
        assert watched.sent[-1] == {"type": "http.response.body", "body": b""}
        assert made.house[Feed].watchers == 0


async def test_a_watcher_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.gateway.guests.live.routes.STUCK_S", 0.05)
    made = gateway(admin_key=KEY)
    watched = Watched(made, reads=2)
    await watched.until(2)
    await asyncio.sleep(1.0)
    assert made.house[Feed].watchers == 0
    await watched.leave()
