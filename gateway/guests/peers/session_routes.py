"""Lets several gateways answer as one, on all routes other than calls.

A request for a session is forwarded to its owner, one for a response to the gateway that generates or has stored it. A
change of engines is made in all gateways, and worker processes merge their `/metrics`. Calls are forwarded by
`gateway/api/call_api.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

import msgspec
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import PlaitError
from plait.backends.protocol.surrogates import with_whole_pairs
from plait.gateway.api.auth import key_of
from plait.gateway.guests.peers.forwarding import Forwarding, OwnedName
from plait.gateway.guests.peers.metrics import merged
from plait.gateway.intake.open_bodies import ADMIN, MOST_ADMIN_BYTES, OpenBodies, OpenBody
from plait.gateway.others import ADMIN_KEY, API_KEYS, METRICS_KEY, Checked, Forwarded, ResponsesHere, is_of_peer

OF_A_SESSION: Final = re.compile(r"/v1/(?:sessions|variables)/([^/]+)")
OF_A_RESPONSE: Final = re.compile(r"/v1/responses/([^/]+)")
NAMING_A_SESSION: Final = frozenset(("/v1/sessions", "/v1/variables", "/v1/get", "/v1/submit", "/v1/programs"))
"""Routes whose body may name a session."""

METRICS: Final = "/metrics"
ENGINES: Final = "/admin/engines"
MAX_METRICS_BYTES: Final = 64 * 2**20

log = structlog.get_logger(__name__)


class _Named(msgspec.Struct):
    """The fields of a body that name a session. Without a name, the session is new and is created here."""

    session_id: str | None = None
    session: str | None = None


_NAMED: Final = msgspec.json.Decoder(_Named)


class SessionRoutes:
    """ASGI middleware. `tenant_of` checks a request's API key, `check_admin` an operator's key.

    `responses` are those that are here; None: this gateway has none. Raises `PlaitError`.
    """

    def __init__(
        self,
        app: ASGIApp,
        forwarding: Forwarding,
        bodies: OpenBodies,
        *,
        tenant_of: Callable[[Scope], str],
        check_admin: Callable[[Scope], None],
        responses: ResponsesHere | None,
    ) -> None:
        self._app = app
        self._forwarding = forwarding
        self._bodies = bodies
        self._tenant_of = tenant_of
        self._check_admin = check_admin
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method, is_first = scope["path"], scope["method"], not is_of_peer(scope)
        if path == METRICS and method == "GET" and is_first and not self._forwarding.peers.share:
            await self._metrics(scope, receive, send)
        elif path.startswith(ENGINES) and method != "GET" and is_first:
            await self._everywhere(scope, receive, send)
        else:
            await self._by_session(scope, receive, send)

    async def _by_session(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request here or forward it. The application refuses a wrong key."""
        try:
            tenant = self._tenant_of(scope)
        except PlaitError:
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if self._responses is not None and (response := OF_A_RESPONSE.match(path)) is not None:
            await self._at_holder(tenant, response, self._responses, scope=scope, receive=receive, send=send)
        elif path in NAMING_A_SESSION and scope["method"] == "POST":
            with self._bodies.open(scope, tenant) as opened:
                if not await self._is_elsewhere(opened, scope, receive, send):
                    await self._app(scope, receive, send)
        else:
            found, asked = OF_A_SESSION.match(path), _forwarded(scope, Checked(API_KEYS, tenant))
            owned = OwnedName(tenant, None if found is None else found[1])
            if not await self._forwarding.forward_to_owner(owned, asked, receive, send):
                await self._app(scope, receive, send)

    async def _is_elsewhere(self, opened: OpenBody, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether another gateway owns the session that the body names. If so, it has answered."""
        body = await opened.read(receive, scope["headers"])
        owned = OwnedName(opened.tenant, _session_in(body))
        asked = _forwarded(scope, Checked(API_KEYS, opened.tenant), body)
        return await self._forwarding.forward_to_owner(owned, asked, receive, send)

    async def _at_holder(
        self,
        tenant: str,
        path: re.Match[str],
        responses: ResponsesHere,
        *,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serve a response's route where the response is. A background response is a session until it has ended."""
        response_id = path[1]
        if not responses.has(tenant, response_id):
            forwarding, asked = self._forwarding, _forwarded(scope, Checked(API_KEYS, tenant))
            owned = OwnedName(tenant, response_id if forwarding.peers.share else None)
            if await forwarding.forward_to_owner(owned, asked, receive, send):
                return
            if not is_of_peer(scope):
                stream = responses.stream(tenant, response_id)
                holder = await forwarding.holder(stream, quote(path[0], errors="surrogatepass"), scope["headers"])
                if holder is not None:
                    await forwarding.forward(holder, asked, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _everywhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make a change of engines here, and if this succeeds, in all other gateways."""
        self._check_admin(scope)
        with self._bodies.open(scope, ADMIN) as opened:
            body = await opened.read(receive, scope["headers"], MOST_ADMIN_BYTES)
            answer = await _whole(self._app, scope, receive)
        if answer[0]["status"] < 300:
            answers = await self._forwarding.ask_all(_forwarded(scope, Checked(ADMIN_KEY), body), MOST_ADMIN_BYTES)
            for name, told in answers.items():
                if told is None:
                    log.warning("a gateway does not hear of a change of engines", gateway=name)
                elif told.status >= 300:
                    log.warning("a gateway refuses a change of engines", gateway=name, status=told.status)
        for message in answer:
            await send(message)

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, *rest = await _whole(self._app, scope, receive)
        if start["status"] == 200:
            peers = self._forwarding.peers
            texts: dict[str, bytes | None] = dict.fromkeys(peers.urls)
            texts[peers.own] = b"".join(message.get("body", b"") for message in rest)
            asked = _forwarded(scope, Checked(METRICS_KEY))
            for name, told in (await self._forwarding.ask_all(asked, MAX_METRICS_BYTES)).items():
                texts[name] = told.body if told is not None and told.status == 200 else None
            body = merged(texts)
            kept = [item for item in start["headers"] if item[0] != b"content-length"]
            start = {**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]}
            rest = [{"type": "http.response.body", "body": body}]
        for message in (start, *rest):
            await send(message)


def _session_in(body: bytes) -> str | None:
    """The session that a body names; None if it names none, or is no JSON (the application refuses it)."""
    try:
        named = _NAMED.decode(with_whole_pairs(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return named.session_id or named.session


def _forwarded(scope: Scope, checked: Checked, body: bytes = b"") -> Forwarded:
    """The request for another gateway, without the root path of a proxy."""
    target, query = quote(scope["path"], errors="surrogatepass"), scope.get("query_string", b"").decode("latin-1")
    port, checked = (scope.get("server") or ("", None))[1], checked._replace(key=key_of(scope))
    return Forwarded(scope["method"], f"{target}?{query}" if query else target, scope["headers"], checked, body, port)


async def _whole(app: ASGIApp, scope: Scope, receive: Receive) -> list[dict[str, Any]]:
    """Collect all messages of the application's answer."""
    messages: list[dict[str, Any]] = []

    async def keep(message: Message) -> None:
        messages.append(dict(message))

    await app(scope, receive, keep)
    return messages
