"""ASGI middleware in front of all routes: verifies which requests are forwarded by other gateways.

It also answers the question of `namesake.py`, whether a gateway is at this address.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from hashlib import sha256
from typing import Any

import msgspec
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import CallerError
from plait.gateway.asgi import OnRefused, WatchedReceive, id_of, send_error, send_whole
from plait.gateway.guests.peers.forwarding import Forwarding
from plait.gateway.guests.peers.membership import OF_PEER
from plait.gateway.guests.peers.signatures import KEY_HEADER, PEER_HEADER, Said, SignedForAnotherTimeError
from plait.gateway.others import CHECKED, PEER_KEY

log = structlog.get_logger(__name__)


class PeerFront:
    """Marks forwarded requests in their scope. `on_refused` is called with the errors that this middleware answers."""

    def __init__(self, app: ASGIApp, forwarding: Forwarding, on_refused: OnRefused) -> None:
        self._app = app
        self._on_refused = on_refused
        self._forwarding = forwarding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = next((value for name, value in scope.get("headers", ()) if name == PEER_HEADER), b"")
        try:
            said = self._said(header, scope)
        except SignedForAnotherTimeError as error:
            log.warning("a gateway's request is refused: the clocks differ", seconds=round(error.by_s))
            self._on_refused(scope, error)
            await send_error(send, error, id_of(scope))
            return
        if said is not None:
            if said.checked.ring == PEER_KEY:
                await send_whole(send, 200, (), self._forwarding.peers.key.answer(header))
                return
            scope, receive = _of_peer(scope, said), _signed(receive, said)
        before = OF_PEER.set(said is not None)
        try:
            await self._app(scope, receive, send)
        finally:
            OF_PEER.reset(before)

    def _said(self, header: bytes, scope: Scope) -> Said | None:
        """The signed statements about a forwarded request; None for a request of a client."""
        if not header:
            return None
        peers = self._forwarding.peers
        return peers.key.read_request(header, scope, peers.own, time.time())


def _of_peer(scope: Scope, said: Said) -> Scope:
    """The scope as it was in the gateway that has forwarded the request."""
    id_of(scope)  # sets the request id, which the copy below then shares
    headers = [item for item in scope["headers"] if item[0] not in (PEER_HEADER, KEY_HEADER)]
    server = (scope["server"][0], said.port) if said.port else scope["server"]
    return {**scope, "headers": headers, "server": server, CHECKED: said.checked}


class ChangedBodyError(CallerError, code="changed_body", quotes=False):
    """The body of a forwarded request is not the signed one."""

    def __init__(self) -> None:
        super().__init__("The body is not the one that a gateway has signed.")


class SignedBody(WatchedReceive, eq=False, kw_only=True):
    """The ASGI receive of a forwarded request. Raises `ChangedBodyError` at the end of a body that was not signed."""

    body_sha256: str
    sum: Any = msgspec.field(default_factory=sha256)

    def __call__(self) -> Awaitable[Message]:
        return self._received()

    def is_own(self, send: Send) -> bool:
        """Whether what is sent so goes to this client as it is."""
        return isinstance(self.receive, WatchedReceive) and self.receive.is_own(send)

    @property
    def has_answer(self) -> bool:
        """Whether an answer has begun, as far as the server says."""
        return isinstance(self.receive, WatchedReceive) and self.receive.has_answer

    async def _received(self) -> Message:
        message = await self.receive()
        if message["type"] == "http.request":
            self.sum.update(message.get("body", b""))
            if not message.get("more_body", False) and self.sum.hexdigest() != self.body_sha256:
                raise ChangedBodyError
        return message


def _signed(receive: Receive, said: Said) -> Receive:
    """A receive that verifies the body."""
    client = receive.client if isinstance(receive, WatchedReceive) else None
    return SignedBody(receive=receive, client=client, body_sha256=said.body_sha256)
