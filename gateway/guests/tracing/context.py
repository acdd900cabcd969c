"""Which calls are traced, and the ids of their spans (W3C Trace Context).

An id is a digest of what it names, so that whoever needs it computes it: an attempt when it is sent and again for its
span, the caller of a variable for its link, a gateway that takes over a program for the program's span.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, NamedTuple

from plait.gateway.asgi import Headers

_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED: Final = 1


class Parent(NamedTuple):
    """What a request says of its trace."""

    trace_id: int
    span_id: int
    is_sampled: bool


def parent_of(traceparent: bytes) -> Parent | None:
    """The parent of a request's span; None if the header is not valid."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return None
    return Parent(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & _SAMPLED))


def digest(*names: object, size: int = 8) -> int:
    """An id of `size` bytes, which is never 0."""
    place = "\0".join(map(str, names)).encode("utf-8", "replace")
    return int.from_bytes(blake2b(place, digest_size=size).digest()) or 1


def with_parent(headers: Iterable[tuple[bytes, bytes]], trace_id: int, span_id: int) -> Headers:
    """The headers of a request whose span has this parent."""
    kept = [item for item in headers if item[0] != b"traceparent"]
    return [*kept, (b"traceparent", f"00-{trace_id:032x}-{span_id:016x}-01".encode())]
