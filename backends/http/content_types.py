"""What the headers of a message say of its body."""

from __future__ import annotations

from collections.abc import Sequence


def is_event_stream(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether these are the headers of a stream of server-sent events."""
    for name, value in headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def is_no_json(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether these headers say that the body is no JSON."""
    for name, value in headers:
        if name == b"content-type":
            return b"json" not in value
    return False
