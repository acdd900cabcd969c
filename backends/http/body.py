"""The bodies of requests to engines: bytes, or a stored body that is read while it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

SLICE_BYTES: Final = 256 * 1024
"""A longer body is sent in slices of this size."""


class StoredBody(Protocol):
    """A body that is not in memory. It may be sent several times."""

    def __len__(self) -> int: ...

    def slices(self) -> Iterator[bytes]:
        """The body from its beginning, in pieces of at most `SLICE_BYTES`."""


Body = bytes | StoredBody


def slices(body: Body) -> Iterator[bytes | memoryview]:
    """A body in pieces. Bytes are not copied."""
    if not isinstance(body, bytes):
        return body.slices()
    view = memoryview(body)
    return (view[at : at + SLICE_BYTES] for at in range(0, len(view), SLICE_BYTES))
