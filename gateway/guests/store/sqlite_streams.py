"""The layout of streams in a SQLite file, and how to read them, even if they are damaged.

The id of an event is the number of its stream, shifted by `EVENTS_BITS`, plus its place in the stream. So a stream's
events are adjacent in the table, and are found and deleted without another index; a gap shows a lost event. An event's
checksum covers its data, id, version and time, and its stream's key. In an earlier schema, it covered the data only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, Final
from zlib import crc32

from plait.gateway.guests.store.event_log import LOST
from plait.gateway.streams import Change, StoredStream, StreamKey

EVENTS_BITS: Final = 24
"""A stream has at most 2**24 events (a session may have 200,000 variables), which leaves 2**39 streams."""

Row = tuple[int, int, float, int, bytes]
"""An event: its id, version, time, checksum and data."""


SQLITE_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite's module raises. Its message may quote a damaged byte, which is a UnicodeDecodeError then."""

_STREAMS: Final = "SELECT stream, kind, tenant, name FROM streams"
_EVENTS: Final = "SELECT event, version, at_unix_s, checksum, data FROM events WHERE event BETWEEN ? AND ?"


def row_of(event: int, change: Change) -> Row:
    assert change.data is not None
    checksum = _checksum(_names_checksum(change.stream), event, change, change.data)
    return event, change.version, change.at_unix_s, checksum, change.data


def event_ids(stream: int) -> tuple[int, int]:
    """The ids of the first and the last event that a stream can have."""
    return stream << EVENTS_BITS, ((stream + 1) << EVENTS_BITS) - 1


def stream_of(database: sqlite3.Connection, stream: int, key: StreamKey) -> StoredStream:
    """The stream with this number, with its problem if it is damaged. Raises `sqlite3.Error`."""
    return _checked(stream, key, database.execute(f"{_EVENTS} ORDER BY event", event_ids(stream)).fetchall())


def numbered_streams(database: sqlite3.Connection) -> Iterator[tuple[int, StreamKey]]:
    """All streams, the oldest first, with their numbers. Raises `sqlite3.Error`."""
    known = dict[int, StreamKey]()
    for stream, *names in database.execute(f"{_STREAMS} ORDER BY stream"):
        known[stream] = StreamKey(*map(str, names))
    for stream in _streams_with_events(database):
        known.setdefault(stream, StreamKey(LOST, "", str(stream)))
    yield from sorted(known.items())


def last_stream(database: sqlite3.Connection) -> int:
    """The highest number of a stream, also of one whose key is lost; 0 without any. Raises `sqlite3.Error`."""
    (stream,) = database.execute("SELECT coalesce(max(stream), 0) FROM streams").fetchone()
    (event,) = database.execute("SELECT coalesce(max(event), 0) FROM events").fetchone()
    return max(int(stream), int(event) >> EVENTS_BITS)


def text_of(data: bytes) -> str:
    """Decodes a text of the database, even if a byte of it is damaged."""
    return data.decode(errors="replace")


def _names_checksum(key: StreamKey) -> int:
    return crc32("\0".join(key).encode(errors="surrogatepass"))


def _checksum(names: int, event: int, change: Change, data: bytes) -> int:
    return crc32(data, crc32(f"{event} {change.version} {float(change.at_unix_s)!r}".encode(), names))


def _checked(stream: int, key: StreamKey, rows: Sequence[tuple[Any, ...]]) -> StoredStream:
    """The stream that these rows make. A damaged byte may have changed the type of a value."""
    events, problem, names = list[Change](), None if rows else "its events are gone", _names_checksum(key)
    first, _ = event_ids(stream)
    for place, (event, version, at_unix_s, checksum, data) in enumerate(rows):
        if not (isinstance(version, int) and isinstance(at_unix_s, float) and isinstance(data, bytes)):
            problem = problem or f"event {event} is malformed"
            continue
        change = Change(key, at_unix_s, data, version)
        events.append(change)
        if event != first + place:
            problem = problem or f"events before event {event} are gone"
        elif checksum != _checksum(names, event, change, data) and checksum != crc32(data):
            problem = problem or f"event {event} is not what was written"
    return StoredStream(key, events, "its names are gone" if key.kind == LOST else problem)


def _streams_with_events(database: sqlite3.Connection) -> Iterator[int]:
    """The numbers of the streams that have events. One index search for each, instead of a scan of all events."""
    stream = -1
    while True:
        _, last = event_ids(stream)
        (event,) = database.execute("SELECT min(event) FROM events WHERE event > ?", (last,)).fetchone()
        if event is None:
            return
        stream = event >> EVENTS_BITS
        yield stream
