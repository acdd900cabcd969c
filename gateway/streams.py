"""What outlives a gateway: streams of events, such as one for each session. An event is opaque bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

RECORD_VERSION: Final = 1
"""The version of the events of sessions. A later release also reads earlier versions."""

SESSION: Final = "session"
"""The kind of a session's stream."""

DELETED: Final = "deleted"
"""The kind of a stream with the end of the refusal of a deleted session's id."""

RESPONSE: Final = "response"
"""The kind of a response's stream."""


class StreamKey(NamedTuple):
    """The unique key of a stream. `kind` is what it records, such as `session`; `name` is that thing's id."""

    kind: str
    tenant: str
    name: str


class Change(NamedTuple):
    """One event of a stream. Without `data` the stream ends: all of its events are deleted.

    `version` is that of the form of `data`.
    """

    stream: StreamKey
    at_unix_s: float
    data: bytes | None
    version: int = 1


class StoredStream(NamedTuple):
    """A stream as read, with its events in the order of their writes.

    `problem` says what is damaged: such a stream may lack events.
    """

    key: StreamKey
    events: Sequence[Change]
    problem: str | None = None
