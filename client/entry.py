"""What a session collects: values, calls and native steps, each as it is sent, in parts that fit into a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

BATCH_CALLS = 1024
"""The most calls and native steps of a request: what a gateway takes by default (`sessions.max_program_calls`)."""
BATCH_BYTES = 16 * 2**20
"""About the most bytes of a request: half of what a gateway takes by default (`server.max_body_bytes`)."""

Field = Literal["values", "calls", "natives"]
"""The field of a program that an entry is in."""


@dataclass(slots=True, eq=False)
class Entry:
    """A value that is set, a call, or a native step. `what` is for people. `content` is its JSON text, the same
    whenever it is sent.

    `carriers` counts the requests that are under way with it. It is `settled` once the gateway has taken or refused it.
    """

    number: int
    field: Field
    what: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    content: msgspec.Raw
    carriers: int = 0
    settled: bool = False
    was_sent: bool = False


def parted(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The entries in parts that fit into a request. An entry comes after those whose outputs it takes."""
    part: list[Entry] = []
    calls = size_bytes = 0
    for entry in entries:
        own_calls, own_bytes = int(entry.field != "values"), len(bytes(entry.content))
        calls, size_bytes = calls + own_calls, size_bytes + own_bytes
        if part and (calls > BATCH_CALLS or size_bytes > BATCH_BYTES):
            yield part
            part, calls, size_bytes = [], own_calls, own_bytes
        part.append(entry)
    if part:
        yield part
