"""Server-sent events: reads those of a chat stream, and writes named ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

Event = Mapping[str, Any]
"""The data of an event. Its `type` is also the event's name."""


def read_events(events: bytes) -> Iterator[tuple[list[bytes], bytes | None]]:
    """The comments and the data of each event. The data is None if the event has none."""
    lines = events.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for event in lines.split(b"\n\n"):
        comments, data = list[bytes](), list[bytes]()
        for line in event.split(b"\n"):
            if line.startswith(b":"):
                comments.append(line)
            elif line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
        if comments or data:
            yield comments, b"\n".join(data) if data else None


def write_comments(comments: Iterable[bytes]) -> bytes:
    """Comments as an event without data; no bytes without comments."""
    lines = b"\n".join(comments)
    return lines + b"\n\n" if lines else b""


def write_event(event: Event) -> bytes:
    """An event with its name."""
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), msgspec.json.encode(event))
