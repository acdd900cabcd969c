"""Reads the kind of a message's body from its headers."""

from __future__ import annotations

from collections.abc import Sequence


def is_event_stream(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def should_be_json(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a body says that it is JSON, or is a page, as proxies send in place of an answer."""
    return any(name == b"content-type" and (b"json" in value or b"html" in value) for name, value in headers)


def is_no_json(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:
        if name == b"content-type":
            return b"json" not in value
    return False
