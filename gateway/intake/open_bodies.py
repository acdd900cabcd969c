"""The bodies of requests: decoded, and bounded by tenant and by rate.

Every body is read here, whatever route it is for and whoever has to look at it first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final, Self

import msgspec
from starlette.types import Receive, Scope

from plait.backends.errors import BodyTooLargeError, LimitError, ReachedLimit
from plait.gateway.asgi import PART_BYTES, ClientGoneError, Headers
from plait.gateway.intake.body_encodings import decoder_of
from plait.gateway.intake.turns import LoopTurns
from plait.gateway.timer import loop_time_s

LARGE_BYTES: Final = 64 * 1024
"""The first bytes of each body do not wait."""

BYTES_PER_S: Final = 100e6
"""The pace of a tenant's large bodies while the event loop is late. To receive, join and decode a byte takes some 5 ns,
so that a tenant's bodies take half of the loop at most then."""

ADMIN: Final = "admin"
"""The owner of the bodies that operators send; no tenant has this identity."""

MOST_ADMIN_BYTES: Final = 2**16
"""The largest body of an operator."""

BODY: Final = "plait.body"
"""The key of an ASGI scope under which the request's `OpenBody` is kept."""


class BodyPace:
    """Spreads each tenant's large bodies over time, so that others get their turns on the event loop."""

    def __init__(self, bytes_per_s: float = BYTES_PER_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s: dict[str, float] = {}  # when a tenant's line is free

    def wait_s(self, tenant: str, size: int, now_s: float) -> float:
        """Seconds until so many bytes have their turn, which is behind the turns of the tenant's others."""
        begins_s = max(now_s, self._free_s.get(tenant, now_s))
        self._free_s[tenant] = begins_s + size / self._bytes_per_s
        return begins_s - now_s


class OpenBodies:
    """Counts each tenant's bytes, from the first one of a body until its request has ended.

    `max_bytes` bounds one body, `max_multipart_bytes` one with files, `max_tenant_bytes` all of a tenant's. Bodies are
    read in their tenants' `turns`. While these are late, those above `short_bytes` are read at their tenant's `pace`.
    """

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

    def open(self, scope: Scope, tenant: str) -> OpenBody:
        """The body of a tenant's request: the one that was opened for it before, or a new one."""
        found: OpenBody | None = scope.get(BODY)
        if found is None:
            found = scope[BODY] = OpenBody(self, tenant)
        return found

    def __repr__(self) -> str:
        return f"OpenBodies({self._bytes})"

    def bytes_of(self, tenant: str) -> int:
        return self._bytes.get(tenant, 0)

    def begin(self, tenant: str, size: int) -> bool:
        """Whether the turn of a whole body is now: then it counts until `remove`. Raises `LimitError`."""
        if not self.turns.may_begin(tenant):
            return False
        self.add(tenant, size)
        return True

    def add(self, tenant: str, size: int) -> None:
        """So many bytes have come. Raises `LimitError`, and then counts nothing."""
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

    def wait_s(self, tenant: str, size: int) -> float:
        """Seconds until so many bytes of a large body have their turn."""
        return self._pace.wait_s(tenant, size, loop_time_s()) if self.turns.is_late() else 0.0

    def remove(self, tenant: str, size: int) -> None:
        left = self._bytes.get(tenant, 0) - size
        if left:
            self._bytes[tenant] = left
        else:
            self._bytes.pop(tenant, None)


class OpenBody(msgspec.Struct, eq=False):
    """A body that a tenant begins to send, of which `size` bytes have come. As a context it ends with its request.

    Whoever has to look at it first opens it by `OpenBodies.open`, and the next one has it from there. So each byte
    counts once.
    """

    bodies: OpenBodies
    tenant: str
    size: int = 0
    whole: bytes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop counting the body, and let its bytes go."""
        size, self.size, self.whole = self.size, 0, None
        self.bodies.remove(self.tenant, size)

    async def read(self, receive: Receive, headers: Headers, max_bytes: int | None = None) -> bytes:
        """The whole body, decoded as its `Content-Encoding` says, of `max_bytes` at most. It may be read again.

        Raises `BodyTooLargeError` and `LimitError` as soon as it is too much, `LimitError` while the event loop cannot
        take it, and `CallerError` for an encoding that is not known or not kept.
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
        """The body as it comes, which is not kept here. Raises as `read` does."""
        await self.bodies.turns.begin(self.tenant)
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
                if wait_s or decoder is not None:  # much may come out of a little
                    await asyncio.sleep(wait_s)
        if decoder is not None:
            decoder.end()

    def _add(self, size: int) -> float:
        self.bodies.add(self.tenant, size)
        self.size += size
        return self.bodies.wait_s(self.tenant, size) if self.size > LARGE_BYTES else 0.0


class Gathered:
    """The pieces of a body. One that comes in a single piece is not copied."""

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
