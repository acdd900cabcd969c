"""Lets several gateways answer as one on all routes that are no calls.

A request for a session goes to the gateway that has it, one for a stored response to the one that has stored it. A
change of the engines is made in all of them, and `/metrics` has the metrics of all. Calls are forwarded where they are
read (`gateway/api/call_api.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import AuthenticationError, PeerUnavailableError, PlaitError
from plait.backends.protocol.surrogates import with_whole_pairs
from plait.gateway.asgi import ClientGoneError, Headers, id_of, send_error
from plait.gateway.intake.open_bodies import ADMIN, MOST_ADMIN_BYTES, OpenBodies, OpenBody
from plait.gateway.peers.forwarding import Forwarded, Forwarding, OwnedName
from plait.gateway.peers.membership import OF_PEER
from plait.gateway.peers.metrics import merged
from plait.gateway.peers.peers import PEER_HEADER
from plait.gateway.store.event_log import StreamKey

OF_A_SESSION: Final = re.compile(r"/v1/(?:sessions|variables)/([^/]+)")
OF_A_RESPONSE: Final = re.compile(r"/v1/responses/([^/]+)")
NAMING_A_SESSION: Final = frozenset(("/v1/sessions", "/v1/variables", "/v1/get", "/v1/submit", "/v1/programs"))
"""Routes whose body may name a session."""

METRICS: Final = "/metrics"
ENGINES: Final = "/admin/engines"
MAX_METRICS_BYTES: Final = 64 * 2**20

log = structlog.get_logger(__name__)


class _Named(msgspec.Struct):
    """What of a body says which session is meant. A session without a name is new, and lives where it is made."""

    session_id: str | None = None
    session: str | None = None


_NAMED: Final = msgspec.json.Decoder(_Named)


class ResponsesHere(Protocol):
    """The responses that are stored in this gateway."""

    def has(self, tenant: str, response_id: str) -> bool:
        """Whether a response is stored here."""

    def stream(self, tenant: str, response_id: str) -> StreamKey:
        """A response's stream in a store."""


class SessionRoutes:
    """ASGI middleware. `tenant_of` checks the key in a request's headers, `check_admin` whether it is an operator's."""

    def __init__(
        self,
        app: ASGIApp,
        forwarding: Forwarding,
        bodies: OpenBodies,
        *,
        tenant_of: Callable[[Headers], str],
        check_admin: Callable[[Scope], None],
        responses: ResponsesHere,
    ) -> None:
        self._app = app
        self._forwarding = forwarding
        self._bodies = bodies
        self._tenant_of = tenant_of
        self._check_admin = check_admin
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._answer(scope, receive, send)
        except ClientGoneError:
            log.info("client gone", path=scope["path"])
        except PlaitError as error:
            request_id = id_of(scope)
            log.info("refused", request_id=request_id, status=error.status, code=error.code, message=error.message)
            await send_error(send, error, request_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method, is_first = scope["path"], scope["method"], not is_of_peer(scope)
        if path == METRICS and method == "GET" and is_first and not self._forwarding.peers.share:
            await self._metrics(scope, receive, send)
        elif path.startswith(ENGINES) and method != "GET" and is_first:
            await self._everywhere(scope, receive, send)
        else:
            await self._by_session(scope, receive, send)

    async def _by_session(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer here or elsewhere. A wrong key is left to the application, which says so."""
        path, tenant, session = scope["path"], "", None
        with suppress(AuthenticationError):
            tenant = self._tenant_of(scope["headers"])
            if (response := OF_A_RESPONSE.match(path)) is not None:
                if not self._responses.has(tenant, response[1]) and not is_of_peer(scope):
                    stream, asked = self._responses.stream(tenant, response[1]), _forwarded(scope)
                    holder = await self._forwarding.holder(stream, asked.target, scope["headers"])
                    if holder is not None:
                        await self._forwarding.forward(holder, asked, receive, send)
                        return
            elif (found := OF_A_SESSION.match(path)) is not None:
                session = found[1]
            elif path in NAMING_A_SESSION and scope["method"] == "POST":
                with self._bodies.open(scope, tenant) as opened:
                    session = _session_in(await opened.read(receive, scope["headers"]))
                    await self._at_owner(OwnedName(tenant, session), opened, scope, receive, send)
                return
        await self._at_owner(OwnedName(tenant, session), None, scope, receive, send)

    async def _at_owner(
        self, owned: OwnedName, opened: OpenBody | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer by the gateway that has the session, which may be this one. It ends the body that it has read."""
        request = _forwarded(scope, b"" if opened is None else await opened.read(receive, scope["headers"]))
        if not await self._forwarding.forward_to_owner(owned, request, receive, send):
            del request
            await self._app(scope, receive, send)

    async def _everywhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make a change here, and in all others if that was right."""
        self._check_admin(scope)
        with self._bodies.open(scope, ADMIN) as opened:
            body = await opened.read(receive, scope["headers"], MOST_ADMIN_BYTES)
            answer = await _whole(self._app, scope, receive)
        if answer[0]["status"] < 300:
            request = _forwarded(scope, body)
            for name in self._forwarding.peers.others:
                try:
                    async with self._forwarding.asked(name, request) as response:
                        if response.status >= 300:
                            log.warning("a gateway refuses a change of engines", gateway=name, status=response.status)
                except PeerUnavailableError as error:
                    log.warning("a gateway does not hear of a change of engines", gateway=name, error=error.message)
        for message in answer:
            await send(message)

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The metrics of all gateways. A gateway that does not answer is down in them."""
        start, *rest = await _whole(self._app, scope, receive)
        if start["status"] == 200:
            peers = self._forwarding.peers
            texts: dict[str, bytes | None] = dict.fromkeys(peers.urls)
            texts[peers.own] = b"".join(message.get("body", b"") for message in rest)
            for name in peers.others:
                with suppress(PeerUnavailableError):
                    async with self._forwarding.asked(name, _forwarded(scope)) as response:
                        answer = await response.read(MAX_METRICS_BYTES)
                        texts[name] = answer if response.status == 200 else None
            body = merged(texts)
            kept = [item for item in start["headers"] if item[0] != b"content-length"]
            start = {**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]}
            rest = [{"type": "http.response.body", "body": body}]
        for message in (start, *rest):
            await send(message)


class PeerFront:
    """ASGI middleware in front of everything: notes which requests are of other gateways of `forwarding`."""

    def __init__(self, app: ASGIApp, forwarding: Forwarding) -> None:
        self._app = app
        self._forwarding = forwarding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        signed = next((value for name, value in scope.get("headers", ()) if name == PEER_HEADER), None)
        port = None if signed is None else self._forwarding.peers.signed_port(signed)
        if port is not None:
            headers = [item for item in scope["headers"] if item[0] != PEER_HEADER]
            server = (scope["server"][0], port) if port else scope["server"]
            id_of(scope)  # both scopes have it
            scope = {**scope, "headers": headers, "server": server, "plait.is_of_peer": True}
        before = OF_PEER.set(port is not None)
        try:
            await self._app(scope, receive, send)
        finally:
            OF_PEER.reset(before)


def _session_in(body: bytes) -> str | None:
    """The session that a body names; None if it names none, or is no JSON: then the application refuses it."""
    try:
        named = _NAMED.decode(with_whole_pairs(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return named.session_id or named.session


def is_of_peer(scope: Scope) -> bool:
    """Whether another gateway has sent the request: it is answered here."""
    return "plait.is_of_peer" in scope


def _forwarded(scope: Scope, body: bytes = b"") -> Forwarded:
    """A request as another gateway gets it."""
    target, query = scope.get("raw_path") or scope["path"].encode(), scope.get("query_string", b"")
    if query:
        target = b"%b?%b" % (target, query)
    port = (scope.get("server") or ("", None))[1]
    return Forwarded(scope["method"], target.decode("latin-1"), scope["headers"], body, port)


async def _whole(app: ASGIApp, scope: Scope, receive: Receive) -> list[dict[str, Any]]:
    """All messages of the application's answer."""
    messages: list[dict[str, Any]] = []

    async def keep(message: Message) -> None:
        messages.append(dict(message))

    await app(scope, receive, keep)
    return messages
