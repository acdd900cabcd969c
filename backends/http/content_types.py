"""Reads the kind of a message's body from its headers."""

from __future__ import annotations

from collections.abc import Sequence


def is_event_stream(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def is_no_json(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:
        if name == b"content-type":
            return b"json" not in value
    return False
