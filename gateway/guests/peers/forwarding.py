"""Forwards a request to the gateway that owns its session, and streams the answer back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import structlog
from starlette.types import Receive, Send

from plait.backends.errors import EngineError, PeerUnavailableError, PlaitError
from plait.backends.http.client import HttpClient, Response, Timeouts
from plait.backends.http.content_types import is_event_stream
from plait.gateway.asgi import KEY_HEADERS, Headers, unless_gone
from plait.gateway.guests.peers.membership import Membership, SessionMovedError, UnreachableStoreError
from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.signatures import KEY_HEADER, PEER_HEADER
from plait.gateway.ids import RESPONSE_ID, SESSION_ID
from plait.gateway.others import API_KEYS, OF_ANYBODY, Checked, Forwarded, Others, Told
from plait.gateway.streams import StreamKey

WAITS: Final = Timeouts(connect_s=2.0, first_byte_s=86_400.0, idle_s=86_400.0)
"""A get may wait for a variable for a day. No shorter limit is needed: a gateway that ends closes its connections."""

MOVES: Final = 3
"""The most tries with gateways that turn out not to own the session. The store is asked again for each."""

ALL_S: Final = 1.0
"""The time for an answer to a request that goes to all gateways. Prometheus waits for 10 s by default."""

_OF_A_HOP: Final = frozenset((
    b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"content-length", b"host",
    b"expect", b"date",
    b"content-encoding",  # the forwarded body is decoded
    b"origin",  # CORS is checked by the gateway that the page has asked
    PEER_HEADER,
    KEY_HEADER,
))  # fmt: skip

_OF_AN_ANSWER: Final = frozenset((b"content-length", b"content-encoding"))
"""The body of an answer is forwarded unchanged, so these headers stay."""

log = structlog.get_logger(__name__)


class OwnedName(NamedTuple):
    """A tenant's session; None if a request names none."""

    tenant: str
    session: str | None


class Forwarding(Others):
    """The clients to the other gateways: to `peers`, or to those of the `membership` in a shared store."""

    def __init__(self, peers: Peers, membership: Membership | None = None) -> None:
        self.peers = peers if membership is None else membership.peers
        self.own = self.peers.own
        self.is_alone = self.peers.is_alone  # never changes
        self.are_workers = not self.peers.share
        self.membership = membership
        self._clients: dict[str, HttpClient] = {}

    @property
    def missed(self) -> Mapping[str, float]:  # type: ignore[override]
        return {} if self.membership is None else self.membership.roster.missed

    @property
    def odd(self) -> Mapping[str, tuple[str, str]]:  # type: ignore[override]
        return {} if self.membership is None else self.membership.roster.odd

    def described(self) -> Mapping[str, Any]:
        return {} if self.membership is None else self.membership.described()

    def is_own(self, tenant: str, session: str) -> bool:
        return self.peers.is_own(tenant, session)

    async def elsewhere(
        self, tenant: str, session: str | None, *, may_begin: bool = True, is_label: bool = False
    ) -> str | None:
        """The gateway that owns the session; None: this one does. Raises `PlaitError` if the owner cannot be found.

        With `may_begin`, this gateway becomes the owner of a session without one. This gateway also answers, and
        refuses, requests with an invalid id. With `is_label`, a session whose owner cannot be found counts as this
        gateway's, because the call only names it.
        """
        if not SESSION_ID.fits(session):
            return None
        if self.membership is None:
            return None if self.peers.is_own(tenant, session) else self.peers.owner(tenant, session)
        try:
            return await self.membership.elsewhere(tenant, session, may_begin=may_begin)
        except (UnreachableStoreError, PeerUnavailableError):
            if is_label:
                return None
            raise

    @asynccontextmanager
    async def asked(self, name: str, request: Forwarded) -> AsyncIterator[Response]:
        """Another gateway's answer to a request. Raises `PeerUnavailableError` if it fails or breaks off."""
        headers, response = self._headers(name, request), None
        try:
            response = await self._client(name).request(request.method, request.target, headers, request.body)
            yield response
        except EngineError as error:
            raise _unavailable() from error
        finally:
            if response is not None:
                response.abort()

    async def ask_all(self, request: Forwarded, max_bytes: int) -> Mapping[str, Told | None]:
        """The answers of all other gateways, by name; None for one that is silent for `ALL_S`."""
        names = self.peers.others
        told = await asyncio.gather(*(self._told(name, request, max_bytes) for name in names))
        return dict(zip(names, told, strict=True))

    async def _told(self, name: str, request: Forwarded, max_bytes: int) -> Told | None:
        with suppress(PeerUnavailableError, TimeoutError):
            async with asyncio.timeout(ALL_S), self.asked(name, request) as response:
                return Told(response.status, await response.read(max_bytes))
        return None

    def _headers(self, name: str, request: Forwarded) -> Headers:
        """The headers of a request to another gateway. The client's API key stays here: a signature replaces it."""
        key, has_engines_key = self.peers.key, request.checked == OF_ANYBODY
        left_out = _OF_A_HOP if has_engines_key else _OF_A_HOP | KEY_HEADERS
        kept = [item for item in request.headers if item[0] not in left_out]
        if request.checked.key:
            kept.append((KEY_HEADER, request.checked.key.encode()))
        return [*kept, key.sign_request(request._replace(headers=kept), name, time.time())]

    def _client(self, name: str) -> HttpClient:
        if name not in self._clients:
            self._clients[name] = HttpClient(self.peers.urls[name], name=f"gateway {name}", timeouts=WAITS)
        return self._clients[name]

    async def forward(self, name: str, request: Forwarded, receive: Receive, send: Send) -> None:
        """Forward a request, and its answer. Raises `PeerUnavailableError` and `ClientGoneError`."""
        await unless_gone(receive, self._forward(name, request, send))

    async def forward_to_owner(
        self, owned: OwnedName, request: Forwarded, receive: Receive, send: Send, *, is_label: bool = False
    ) -> bool:
        """Forward a request to the owner of its session; False if this gateway is the owner. Raises as `forward` does.

        With `is_label`, the request only names the session. If the owner has died or cannot be found, the request is
        then served here.
        """
        for _ in range(MOVES):
            name = await self.elsewhere(*owned, may_begin=request.may_begin, is_label=is_label)
            if name is None:
                return False
            try:
                await self.forward(name, request, receive, send)
            except (SessionMovedError, PeerUnavailableError) as error:
                if self.membership is not None and owned.session is not None:
                    self.membership.forget(owned.tenant, owned.session)
                if isinstance(error, PeerUnavailableError):
                    if is_label and self.membership is not None:
                        return False
                    raise
            else:
                return True
        raise _unavailable()

    async def _forward(self, name: str, request: Forwarded, send: Send) -> None:
        async with self.asked(name, request) as response:
            if response.status == SessionMovedError.status:
                raise SessionMovedError
            await pass_on(response, send)

    def part(self) -> None:
        """Fail the requests to gateways that are no members any more."""
        for name in [name for name in self._clients if name not in self.peers.urls]:
            self._clients.pop(name).lose("its lease is over", waiting_only=False)

    async def holder(self, stream: tuple[str, str, str], path: str, headers: Headers) -> str | None:
        """The other gateway that has a stored or background response; None if none has it.

        Without a shared store, or while it is out of reach, all other gateways are asked for `path`. Raises
        `PeerUnavailableError` or `UnreachableStoreError` if none says that it has it, and one cannot say that it has
        not: it is silent, is recovering, or is none of those that are asked.
        """
        stream = StreamKey(*stream)
        if not RESPONSE_ID.fits(stream.name):
            return None
        unknown: PlaitError | None = None
        if self.membership is not None:
            try:
                return await self.membership.holder(stream)
            except UnreachableStoreError as error:
                unknown = error
        asked = Forwarded("GET", path, headers, Checked(API_KEYS, stream.tenant))
        for name in self.peers.others:
            try:
                async with self.asked(name, asked) as response:
                    if response.status == 200:
                        return name
                    if response.status != 404:
                        unknown = unknown or _unavailable()
            except PeerUnavailableError as error:
                unknown = unknown or error
        if unknown is not None:
            raise unknown
        return None

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()


async def pass_on(response: Response, send: Send) -> None:
    """Stream an answer to the client, without its hop-by-hop headers.

    A stream that breaks off ends with an error event. Any other answer stays without its end, so that the server closes
    the connection.
    """
    kept = [item for item in response.headers if item[0] not in _OF_A_HOP or item[0] in _OF_AN_ANSWER]
    await send({"type": "http.response.start", "status": response.status, "headers": kept})
    last = b""
    try:
        while not response.is_read:
            piece = await response.read_chunk()
            if not piece:
                break
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except EngineError as error:
        log.warning("a gateway has broken its answer off", error=error.logged_message)
        if not is_event_stream(response.headers):
            return
        last = b"data: %b\n\n" % _unavailable().body()
    await send({"type": "http.response.body", "body": last})


def _unavailable() -> PeerUnavailableError:
    return PeerUnavailableError("The gateway that may have this does not answer now. Try again.", retry_after_s=1.0)
