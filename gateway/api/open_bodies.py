"""Request bodies that are in the gateway: a tenant may have so many bytes of them at one time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Self

from starlette.types import Receive

from plait.backends.errors import LimitError
from plait.gateway.asgi import Headers, read_body


class OpenBodies:
    """Counts each tenant's bytes, from the first one of a body until its request has ended.

    `max_bytes` bounds one body, `max_tenant_bytes` all of a tenant's.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._bytes: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"OpenBodies({dict(self._bytes)})"

    def bytes_of(self, tenant: str) -> int:
        """Those of the tenant's bodies that are open."""
        return self._bytes[tenant]

    def open(self, tenant: str) -> OpenBody:
        """A body that the tenant begins to send; a context that ends with its request."""
        return OpenBody(self, tenant)

    def add(self, tenant: str, size: int) -> None:
        """So many bytes have come. Raises `LimitError`, and then counts nothing."""
        if self._bytes[tenant] + size > self._max_tenant_bytes:
            raise LimitError(
                f"This key's requests that have not ended have more than {self._max_tenant_bytes} bytes. "
                "Send fewer or shorter ones at one time.",
                code="too_many_open_bytes",
                retry_after_s=1.0,
            )
        self._bytes[tenant] += size

    def remove(self, tenant: str, size: int) -> None:
        """The request of so many bytes has ended."""
        self._bytes[tenant] -= size
        if not self._bytes[tenant]:
            del self._bytes[tenant]


@dataclass(slots=True)
class OpenBody:
    """One body, of which `size` bytes have come."""

    bodies: OpenBodies
    tenant: str
    size: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bodies.remove(self.tenant, self.size)

    async def read(self, receive: Receive, headers: Headers) -> bytes:
        """The whole body. Raises `BodyTooLargeError` and `LimitError` as soon as it is too much."""
        return await read_body(receive, headers, self.bodies.max_bytes, self._add)

    def _add(self, size: int) -> None:
        self.bodies.add(self.tenant, size)
        self.size += size
