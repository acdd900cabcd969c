"""Bytes that the gateway holds: request bodies, bounded by tenant and by rate, and answers until they are whole."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

import msgspec
from starlette.types import Receive

from plait.backends.errors import AnswerTooLargeError, LimitError
from plait.gateway.asgi import Headers, read_body
from plait.gateway.calls.delivery import HeldBytes
from plait.gateway.calls.turns import LoopTurns
from plait.gateway.timer import loop_time_s

LARGE_BYTES: Final = 64 * 1024
"""The first bytes of each body do not wait."""

BYTES_PER_S: Final = 100e6
"""Of one tenant's large bodies. To receive, join and decode a byte takes some 5 ns of the event loop, so a tenant's
bodies take half of it at most."""


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

    `max_bytes` bounds one body, `max_tenant_bytes` all of a tenant's. Bodies are read in their tenants' `turns`, and
    those above `short_bytes` at their tenant's `pace`.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int, pace: BodyPace | None = None) -> None:
        self.max_bytes = max_bytes
        self.short_bytes = min(LARGE_BYTES, max_bytes)
        self.pace = pace or BodyPace()
        self.turns = LoopTurns()
        self._max_tenant_bytes = max_tenant_bytes
        self._bytes: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"OpenBodies({self._bytes})"

    def bytes_of(self, tenant: str) -> int:
        """Those of the tenant's bodies that are open."""
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
            )
        self._bytes[tenant] = held

    def remove(self, tenant: str, size: int) -> None:
        """The request of so many bytes has ended."""
        left = self._bytes.get(tenant, 0) - size
        if left:
            self._bytes[tenant] = left
        else:
            self._bytes.pop(tenant, None)


class OpenBody(msgspec.Struct, eq=False):
    """A body that a tenant begins to send, of which `size` bytes have come. As a context it ends with its request."""

    bodies: OpenBodies
    tenant: str
    size: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bodies.remove(self.tenant, self.size)

    async def read(self, receive: Receive, headers: Headers) -> bytes:
        """The whole body, in its turn to be decoded.

        Raises `BodyTooLargeError` and `LimitError` as soon as it is too much, and `LimitError` while the event loop
        cannot take it.
        """
        await self.bodies.turns.begin(self.tenant)
        body = await read_body(receive, headers, self.bodies.max_bytes, self._add)
        if self.size > LARGE_BYTES and (wait_s := self._wait_s(len(body))):
            await asyncio.sleep(wait_s)
        return body

    def _add(self, size: int) -> float:
        self.bodies.add(self.tenant, size)
        self.size += size
        return self._wait_s(size) if self.size > LARGE_BYTES else 0.0

    def _wait_s(self, size: int) -> float:
        return self.bodies.pace.wait_s(self.tenant, size, loop_time_s())


class OpenAnswers:
    """Counts the bytes of all calls' answers that are not streamed, as they come. At most `max_bytes` may be held."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"OpenAnswers({self.held_bytes} of {self._max_bytes} bytes)"

    def hold(self, size_bytes: int) -> None:
        """Count this much more. Raises `AnswerTooLargeError`, and then counts nothing."""
        if self.held_bytes + size_bytes > self._max_bytes:
            raise AnswerTooLargeError(
                f"The answers that this gateway holds would have more than {self._max_bytes} bytes together. Ask for a "
                "stream or for less, or send the call again later.",
                retry_after_s=1.0,
            )
        self.held_bytes += size_bytes

    def free(self, size_bytes: int) -> None:
        """Count this much less."""
        self.held_bytes -= size_bytes


class OpenAnswer:
    """The bytes of one answer, which count in each of `places` until it ends. As a context it ends for certain."""

    __slots__ = ("_places",)

    def __init__(self, *places: HeldBytes) -> None:
        self._places = dict.fromkeys(places, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    def hold(self, size_bytes: int) -> None:
        """Count this much more in each place. Raises what a place raises."""
        for place in self._places:
            place.hold(size_bytes)
            self._places[place] += size_bytes

    def end(self) -> None:
        """What has come counts nowhere any more."""
        for place in reversed(self._places):
            self.end_in(place)

    def end_in(self, place: HeldBytes) -> None:
        """What has come counts there no more."""
        size_bytes, self._places[place] = self._places[place], 0
        if size_bytes:
            place.free(size_bytes)
