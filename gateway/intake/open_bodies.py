"""Reads the bodies of all requests: decodes them, and limits them by number, by size, by tenant and by rate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from math import inf
from typing import Final, Self

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.backends.errors import BodyTooLargeError, LimitError, ReachedLimit, TooManyOpenRequestsError
from plait.gateway.asgi import PART_BYTES, ClientGoneError, Headers
from plait.gateway.intake.body_encodings import decoder_of
from plait.gateway.intake.turns import LoopTurns
from plait.gateway.timer import loop_time_s

LARGE_BYTES: Final = 64 * 1024
"""The rate limit does not apply to the first bytes of a body."""

BYTES_PER_S: Final = 100e6
"""The rate of a tenant's large bodies while the event loop is late. A byte costs some 5 ns to receive, join and decode,
so that a tenant's bodies then take half of the loop at most."""

SPARE: Final = 1 / 8
"""The part of the connections that tenants with many requests leave to others, to health checks and to operators."""

ADMIN: Final = "admin"
"""The owner of the bodies that operators send; no tenant has this identity."""

MOST_ADMIN_BYTES: Final = 2**16
"""The largest body of an operator."""

BODY: Final = "plait.body"
"""The key of an ASGI scope under which the request's `OpenBody` is kept."""


class BodyPace:
    """A rate limit on each tenant's large bodies, which leaves time of the event loop to others."""

    def __init__(self, bytes_per_s: float = BYTES_PER_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s: dict[str, float] = {}  # by tenant: the end of the last reservation

    def wait_s(self, tenant: str, size: int, now_s: float) -> float:
        """Reserve time for `size` bytes behind the tenant's earlier ones. Returns the seconds to wait for it."""
        begins_s = max(now_s, self._free_s.get(tenant, now_s))
        self._free_s[tenant] = begins_s + size / self._bytes_per_s
        return begins_s - now_s


class OpenBodies:
    """Counts each tenant's requests, and their body bytes from the arrival until nobody needs them any more.

    `max_bytes` limits one body, `max_multipart_bytes` one with files, `max_tenant_bytes` all bodies of a tenant. A body
    waits for its tenant's turn (`turns`). While the loop is late, bodies above `LARGE_BYTES` are slowed down (`pace`).
    """

    most_requests: float = inf
    """With as many open in all, only tenants with few of them may add one."""

    def __init__(
        self, max_bytes: int, max_tenant_bytes: int, pace: BodyPace | None = None, *, max_multipart_bytes: int = 0
    ) -> None:
        self.max_bytes = max_bytes
        self.max_multipart_bytes = max_multipart_bytes
        self.short_bytes = min(LARGE_BYTES, max_bytes)
        self.turns = LoopTurns()
        self._pace = pace or BodyPace()
        self._max_tenant_bytes = max_tenant_bytes
        self._bytes: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._all_requests = 0

    def serve(self, connections: int) -> None:
        """Limit the open requests by the server's `connections`: each request has one."""
        self.most_requests = (1 - SPARE) * connections

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

    def begin(self, tenant: str, size: int) -> bool:
        """Take a turn for a request whose body is whole, and count both until `remove`. False: no turn is free.

        Raises `LimitError`.
        """
        if not self.turns.may_begin(tenant):
            return False
        self.add(tenant, size, 1)
        return True

    def add(self, tenant: str, size: int, requests: int = 0) -> None:
        """Count `size` bytes, of new `requests`. Raises `LimitError` beyond a limit, and then counts nothing."""
        if requests:
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

    def counted(self, tenant: str, answer: ASGIApp) -> ASGIApp:
        """An answer that may wait for long, as a request of the tenant until it ends.

        Nothing is refused here: the request has passed `check`, and may have begun a program since.
        """

        async def answers(scope: Scope, receive: Receive, send: Send) -> None:
            self._count(tenant, 1)
            try:
                await answer(scope, receive, send)
            finally:
                self._count(tenant, -1)

        return answers

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

    def wait_s(self, tenant: str, size: int) -> float:
        """Seconds to wait after `size` bytes of a large body; 0 unless the loop is late."""
        return self._pace.wait_s(tenant, size, loop_time_s()) if self.turns.is_late() else 0.0

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
    """A request's body, of which `size` bytes have arrived. It counts until `end`, or until its `with` block ends.

    Get it by `OpenBodies.open`, so that each byte counts once even if middleware reads the body first.
    """

    bodies: OpenBodies
    tenant: str
    size: int = 0
    requests: int = 0
    """How often the request counts: once for each time that its body was begun to be read."""
    whole: bytes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop counting the request and its body, and free the bytes."""
        size, requests, self.size, self.requests, self.whole = self.size, self.requests, 0, 0, None
        self.bodies.remove(self.tenant, size, requests)

    async def read(self, receive: Receive, headers: Headers, max_bytes: int | None = None) -> bytes:
        """The whole body, decoded by its `Content-Encoding`, of at most `max_bytes`. A second call returns it again.

        Raises `BodyTooLargeError` and `LimitError` as soon as a limit is exceeded, `LimitError` if the event loop is
        overloaded, and `CallerError` for an unknown encoding or malformed data.
        """
        most = self.bodies.max_bytes if max_bytes is None else max_bytes
        if self.whole is None:
            gathered = Gathered()
            async for piece in self.pieces(receive, headers, most):
                gathered.add(piece)
            self.whole = gathered.whole()
        if len(self.whole) > most:
            raise _too_large(most)
        return self.whole

    async def pieces(self, receive: Receive, headers: Headers, max_bytes: int) -> AsyncGenerator[bytes]:
        """Yield the body as it comes, without buffering. Raises as `read` does."""
        await self.bodies.turns.begin(self.tenant)
        self.bodies.add(self.tenant, 0, 1)
        self.requests += 1
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
                wait_s = self._add(len(piece))
                yield piece
                if wait_s or decoder is not None:  # few bytes may decode to many: yield to the event loop
                    await asyncio.sleep(wait_s)
        if decoder is not None:
            decoder.end()

    def _add(self, size: int) -> float:
        self.bodies.add(self.tenant, size)
        self.size += size
        return self.bodies.wait_s(self.tenant, size) if self.size > LARGE_BYTES else 0.0


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
