"""Reads the bodies of all requests: decodes them, and limits them by number, by size and by tenant."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack
from math import inf
from typing import Final, Self

import msgspec
from starlette.types import Receive, Scope

from plait.backends.errors import BodyTooLargeError, LimitError, ReachedLimit, TooManyOpenRequestsError
from plait.gateway.asgi import PART_BYTES, ClientGoneError, Headers
from plait.gateway.intake.body_encodings import decoder_of
from plait.gateway.intake.turns import LoopTurns

SHORT_BYTES: Final = 64 * 1024
"""The longest body of a call without a task."""

SPARE: Final = 1 / 8
"""The part of the connections that tenants with many requests leave to others, to health checks and to operators."""

ADMIN: Final = "admin"
"""The owner of the bodies that operators send; no tenant has this identity."""

MOST_ADMIN_BYTES: Final = 2**16
"""The largest body of an operator."""

BODY: Final = "plait.body"
"""The key of an ASGI scope under which the request's `OpenBody` is kept."""


class OpenBodies:
    """Counts each tenant's requests, and their body bytes from the arrival until nobody needs them any more.

    `max_bytes` limits one body, `max_multipart_bytes` one with files, `max_tenant_bytes` all bodies of a tenant. Each
    request waits for its tenant's turn (`turns`), and so does the next piece of a body that costs much.
    """

    most_requests: float = inf
    """With as many open in all, only tenants with few of them may add one."""

    def __init__(self, max_bytes: int, max_tenant_bytes: int, *, max_multipart_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.max_multipart_bytes = max_multipart_bytes
        self.short_bytes = min(SHORT_BYTES, max_bytes)
        self.turns = LoopTurns()
        self._max_tenant_bytes = max_tenant_bytes
        self._bytes: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._all_requests = 0

    def serve(self, connections: int) -> None:
        """Limit the open requests by the server's `connections`: each request has one."""
        self.most_requests = (1 - SPARE) * connections

    async def request(self, scope: Scope, tenant: str, held: ExitStack) -> OpenBody:
        """Wait for the tenant's turn, then count its request until `held` ends. Raises `LimitError`."""
        await self.turns.take(tenant)
        self.add(tenant, 0, 1)
        held.callback(self.remove, tenant, 0, 1)
        return held.enter_context(self.open(scope, tenant))

    def open(self, scope: Scope, tenant: str) -> OpenBody:
        """The body of a tenant's request. Cached in the scope, so that middleware and route share it."""
        found: OpenBody | None = scope.get(BODY)
        if found is None:
            found = scope[BODY] = OpenBody(self, tenant)
        return found

    def __repr__(self) -> str:
        return f"OpenBodies({self._requests}, bytes={self._bytes})"

    def bytes_of(self, tenant: str) -> int:
        return self._bytes.get(tenant, 0)

    def requests_of(self, tenant: str) -> int:
        return self._requests.get(tenant, 0)

    def add(self, tenant: str, size: int, requests: int = 0) -> None:
        """Count `size` bytes, of new `requests`. Raises `LimitError` beyond a limit, and then counts nothing."""
        if requests and self._all_requests >= self.most_requests:
            self.check(tenant)
        held = self._bytes.get(tenant, 0) + size
        if held > self._max_tenant_bytes:
            raise LimitError(
                f"This key's requests that have not ended have more than {self._max_tenant_bytes} bytes. "
                "Send fewer or shorter ones at one time.",
                code="too_many_open_bytes",
                retry_after_s=1.0,
                reached=ReachedLimit("max_open_body_bytes", self._max_tenant_bytes, held),
            )
        self._bytes[tenant] = held
        if requests:
            self._count(tenant, requests)

    def _count(self, tenant: str, requests: int) -> None:
        self._all_requests += requests
        if of_tenant := self._requests.get(tenant, 0) + requests:
            self._requests[tenant] = of_tenant
        else:
            del self._requests[tenant]

    def check(self, tenant: str) -> None:
        """Raise `TooManyOpenRequestsError` if the tenant may not add a request: there are `most_requests`, and the
        tenant has at least half as many as the one with most.
        """
        if self._all_requests < self.most_requests:
            return
        own = self._requests.get(tenant, 0)
        if 2 * own >= max(self._requests.values()):
            raise TooManyOpenRequestsError(
                f"{self._all_requests} requests are open here, {own} of them of this key. Send fewer at once.",
                retry_after_s=1.0,
            )

    def remove(self, tenant: str, size: int, requests: int = 0) -> None:
        """Count no longer what was added."""
        left = self._bytes.get(tenant, 0) - size
        if left:
            self._bytes[tenant] = left
        else:
            self._bytes.pop(tenant, None)
        if requests:
            self._count(tenant, -requests)


class OpenBody(msgspec.Struct, eq=False):
    """A request's body: its `size` bytes count until `end`, or until its `with` block ends.

    Get it by `OpenBodies.open`, so that each byte counts once even if middleware reads the body first.
    """

    bodies: OpenBodies
    tenant: str
    size: int = 0
    copied: int = 0
    whole: bytes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop counting the body, and free the bytes."""
        size, self.size, self.copied, self.whole = self.size + self.copied, 0, 0, None
        self.bodies.remove(self.tenant, size)

    def hold(self, size: int) -> None:
        """Count `size` bytes that are joined to the body, such as a stored conversation. Raises as `read` does.

        They count three times: as they were, in the chat that tokens are computed of, and in what the engine is sent.
        """
        if self.size + size > self.bodies.max_bytes:
            raise _too_large(self.bodies.max_bytes)
        self.bodies.add(self.tenant, 3 * size)
        self.size += size
        self.copied += 2 * size

    async def read(self, receive: Receive, headers: Headers, max_bytes: int | None = None) -> bytes:
        """The whole body, decoded by its `Content-Encoding`, of at most `max_bytes`. A second call returns it again.

        Raises `BodyTooLargeError` and `LimitError` as soon as a limit is exceeded, and `CallerError` for an unknown
        encoding or malformed data.
        """
        most = self.bodies.max_bytes if max_bytes is None else max_bytes
        if self.whole is None:
            gathered = Gathered()
            async for piece in self.pieces(receive, headers, most):
                gathered.add(piece)
            if self.size > SHORT_BYTES:
                await self.bodies.turns.go_on(self.tenant, self.size)
            self.whole = gathered.whole()
        if len(self.whole) > most:
            raise _too_large(most)
        return self.whole

    async def pieces(self, receive: Receive, headers: Headers, max_bytes: int) -> AsyncGenerator[bytes]:
        """Yield the body as it comes, without buffering. Raises as `read` does."""
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
                raise _too_large(max_bytes)
        decoder, sent, has_more = decoder_of(headers), 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            given, has_more = message.get("body", b""), message.get("more_body", False)
            sent += len(given)
            if sent > max_bytes:
                raise _too_large(max_bytes)
            for piece in (given,) if decoder is None else decoder.feed(given):
                if self.size + len(piece) > max_bytes:
                    raise _too_large(max_bytes)
                self.bodies.add(self.tenant, len(piece))
                self.size += len(piece)
                yield piece
                if decoder is not None or self.size > SHORT_BYTES:  # few bytes may decode to many
                    await self.bodies.turns.go_on(self.tenant)
        if decoder is not None:
            decoder.end()


class Gathered:
    """Joins the pieces of a body. A single piece is not copied."""

    __slots__ = ("_last", "_only", "_parts")

    def __init__(self) -> None:
        self._only: bytes | None = None
        self._parts: list[bytearray] = []
        self._last = bytearray()

    def add(self, piece: bytes) -> None:
        if self._only is None:
            self._only = piece
            return
        self._last += self._only
        self._last += piece
        self._only = b""
        if len(self._last) >= PART_BYTES:
            self._parts.append(self._last)
            self._last = bytearray()

    def whole(self) -> bytes:
        return self._only or b"".join([*self._parts, self._last])


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The request body is too large; this gateway accepts at most {max_bytes} bytes.")
