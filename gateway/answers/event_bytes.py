"""Server-sent events as bytes: finds their ends, with LF or CRLF, and replaces their data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

_END: Final = re.compile(rb"\r?\n\r?\n")


def events_of(whole: bytes) -> list[bytes]:
    """Splits whole events, each with its blank line. An extra blank line after the last one is an item of its own."""
    if b"\r" not in whole:
        *events, rest = [event + b"\n\n" for event in whole.split(b"\n\n")]
        return events if rest == b"\n\n" else [*events, rest[:-2]]
    events, start = [], 0
    for match in _END.finditer(whole):
        events.append(whole[start : match.end()])
        start = match.end()
    if start < len(whole):
        events.append(whole[start:])
    return events


def end_of_last_event(buffer: bytes) -> int:
    """Where the last whole event of a buffer ends; 0 if it has none."""
    if buffer.endswith(b"\n\n"):
        return len(buffer)
    end = 0
    for separator in (b"\n\n", b"\n\r\n"):
        at = buffer.rfind(separator)
        if at >= 0:
            end = max(end, at + len(separator))
    return end


def end_of_event(arrived: bytes) -> int:
    """Where the first event ends; the end of the bytes if that has not arrived."""
    found = _END.search(arrived)
    return len(arrived) if found is None else found.end()


def with_data(event: bytes, data: Mapping[str, Any] | msgspec.Raw) -> bytes:
    before, mark, former = event.partition(b"data:")
    return b"%b%b %b%b" % (before, mark, msgspec.json.encode(data), former[len(former.rstrip()) :])
