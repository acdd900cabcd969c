"""Every route that takes a body, in a process alone, beside workers and with a shared store: the same door for all.

The head is looked at first. Then the body is read within the same bounds, whoever reads it, and counts until its end.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from starlette.routing import Route
from starlette.types import Message

from plait.gateway.app import Gateway
from plait.gateway.config.file import parse_config
from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.signatures import PeerKey
from plait.gateway.intake.open_bodies import ADMIN, MOST_ADMIN_BYTES
from tests.call_routes import ROUTES
from tests.gateway.guests.durability.shared_gateways import shared_memory
from tests.gateway.server.serving import IMPATIENT, LIMITS, serving
from tests.waiting import WITHIN_S

MOST, MOST_OPEN = 100_000, 300_000
FORM = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
FORM_TYPE = "multipart/form-data; boundary=b"
PIECE = b" " * 20_000
KEY, ADMIN_KEY = "sk-one", "sk-admin"
WITHOUT_BODY = {
    "/v1/sessions/{session_id}/close", "/v1/responses/{response_id}/cancel", "/v1/batches/{batch_id}/cancel", "/ping",
    "/{path:path}",
}  # fmt: skip
OWN_BOUND = {"/v1/files"}
"""Routes whose bodies go to a database as they come, within bounds of their own: `test_uploads.py`."""
DEEP = b'{"session_id": "s", "input": ' + b"[" * 20_000
SETTINGS: dict[str, Any] = {
    "server": {
        "api_keys": [KEY], "admin_key": ADMIN_KEY, "max_body_bytes": MOST, "max_multipart_bytes": MOST,
        "max_open_body_bytes": MOST_OPEN,
    },
    "engines": [{"name": "a", "url": "http://127.0.0.1:1"}],
}  # fmt: skip


def alone(_: pytest.MonkeyPatch) -> Gateway:
    return Gateway(parse_config(SETTINGS, "test"))


def worker(_: pytest.MonkeyPatch) -> Gateway:
    peers = Peers({"0": "", "1": "http://127.0.0.1:1"}, "0", PeerKey("key"))
    return Gateway(parse_config(SETTINGS, "test"), workers=peers)


def sharing(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    shared_memory(monkeypatch)
    server = {**SETTINGS["server"], "advertise_url": "http://one", "peer_key": "p" * 32, "secret": "s" * 32}
    return Gateway(
        parse_config({**SETTINGS, "server": server, "store": {"url": "postgresql://plait@db/plait"}}, "test")
    )


GATEWAYS: list[Callable[[pytest.MonkeyPatch], Gateway]] = [alone, worker, sharing]


def paths() -> list[str]:
    """Those of all routes that take a body."""
    routes = [route for route in Gateway(parse_config(SETTINGS, "test")).routes if isinstance(route, Route)]
    posted = {route.path for route in routes if "POST" in (route.methods or ())} - WITHOUT_BODY
    return sorted({*ROUTES, *posted} - OWN_BOUND)


def begun(path: str, piece: bytes) -> bytes:
    """The piece as the beginning of a body of this route."""
    return FORM + piece[len(FORM) :] if path in ROUTES and ROUTES[path].file else piece


@dataclass
class Answer:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    taken: int = 0
    """How many of the pieces the gateway has taken."""

    @property
    def code(self) -> str:
        found = json.loads(self.body)
        code: str = found["error"].get("code") or found["error"]["type"]
        return code


async def ask(gateway: Gateway, path: str, *pieces: bytes, key: str = "", **headers: str) -> Answer:
    """The answer to a POST that has these pieces and more of them, unless the last one is empty."""
    answer, is_ended = Answer(), asyncio.Event()

    async def receive() -> Message:
        if answer.taken == len(pieces):
            await is_ended.wait()
            return {"type": "http.disconnect"}
        piece = pieces[answer.taken]
        answer.taken += 1
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], dict(message["headers"])
        else:
            answer.body += message.get("body", b"")

    given = {
        "authorization": f"Bearer {key}",
        "content-type": FORM_TYPE,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    scope = {
        "type": "http",
        "method": "POST",
        "path": path.replace("{name:path}", "a"),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await asyncio.wait_for(gateway.app(scope, receive, send), WITHIN_S)
    is_ended.set()
    return answer


def is_admin(path: str) -> bool:
    return path.startswith("/admin/")


def right(path: str) -> str:
    return ADMIN_KEY if is_admin(path) else KEY


@pytest.fixture(params=GATEWAYS, ids=lambda made: made.__name__)
async def gateway(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    made: Gateway = request.param(monkeypatch)
    made.kernel.router.health.answered("a", {"m": None})
    yield made
    assert (made.kernel.bodies._bytes, made.kernel.bodies._requests) == ({}, {}), "a body that has ended counts"


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("key", ["", "another"])
async def test_nothing_is_read_without_a_right_key(gateway: Gateway, path: str, key: str) -> None:
    answer = await ask(gateway, path, *[PIECE] * 4, key=key)
    assert (answer.status, answer.taken) == (401, 0)


@pytest.mark.parametrize("path", [path for path in paths() if is_admin(path)])
async def test_nothing_is_read_where_there_is_no_admin_api(
    gateway: Gateway, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.kernel.admin, "_port", 1)
    answer = await ask(gateway, path, *[PIECE] * 4, key=ADMIN_KEY)
    assert (answer.status, answer.taken) == (404, 0)


@pytest.mark.parametrize("path", paths())
async def test_a_body_ends_at_the_bound(gateway: Gateway, path: str) -> None:
    told = await ask(gateway, path, PIECE, key=right(path), content_length=str(MOST + 1))
    came = await ask(gateway, path, begun(path, PIECE), *[PIECE] * 20, key=right(path))
    deflated = gzip.compress(begun(path, bytes(50 * MOST)))
    bomb = await ask(gateway, path, deflated, b"", key=right(path), content_encoding="gzip")
    assert [answer.status for answer in (told, came, bomb)] == [413] * 3
    most = MOST_ADMIN_BYTES if is_admin(path) and path != "/admin/explain" else MOST  # which takes the body of a call
    assert (told.taken, came.taken) == (0, most // len(PIECE) + 1)


@pytest.mark.parametrize("path", paths())
async def test_a_tenants_bodies_end_at_their_bound(gateway: Gateway, path: str) -> None:
    tenant = ADMIN if is_admin(path) else gateway.kernel.keys.check({"headers": [(b"x-api-key", KEY.encode())]})
    held = (MOST_OPEN // (1 if gateway.house.workers is None else 2)) - 30_000
    gateway.kernel.bodies.add(tenant, held)
    answer = await ask(gateway, path, begun(path, PIECE), *[PIECE] * 3, key=right(path))
    gateway.kernel.bodies.remove(tenant, held)
    assert (answer.status, answer.taken) == (429, 2)


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("encode", [None, gzip.compress])
async def test_a_body_that_is_too_deep_is_the_callers_fault(
    gateway: Gateway, path: str, encode: Callable[[bytes], bytes] | None
) -> None:
    sent, headers = (DEEP, {}) if encode is None else (encode(DEEP), {"content_encoding": "gzip"})
    answer = await ask(gateway, path, sent, b"", key=right(path), **headers)
    assert answer.status == 400, answer.body


@pytest.mark.parametrize("path", paths())
async def test_another_encoding_is_refused_with_those_that_are_taken(gateway: Gateway, path: str) -> None:
    answer = await ask(gateway, path, b"x", b"", key=right(path), content_encoding="br")
    assert (answer.status, answer.headers[b"accept-encoding"]) == (415, b"gzip, deflate, zstd")


async def test_a_body_that_is_too_slow_ends_on_every_route(gateway: Gateway) -> None:
    limits = replace(LIMITS, body_timeout_s=IMPATIENT.body_timeout_s)  # a busy client may be late with its head
    async with serving(limits, application=gateway.app, connections=len(paths())) as running:

        async def answer(path: str) -> bytes:
            target = path.replace("{name:path}", "a")
            head = f"POST {target} HTTP/1.1\r\nhost: a\r\nx-api-key: {right(path)}\r\ncontent-type: {FORM_TYPE}\r\n"
            return await running.ask(head.encode() + b"content-length: 99\r\n\r\n" + begun(path, b"{"))

        answers = await asyncio.gather(*map(answer, paths()))
        assert [path for path, said in zip(paths(), answers, strict=True) if b"HTTP/1.1 408 " not in said] == []
