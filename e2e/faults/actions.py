"""What a scripted engine can do instead of a good answer, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Ending(StrEnum):
    """What becomes of the connection: kept, closed, reset (RST), or left open in silence."""

    KEEP = "keep"
    CLOSE = "close"
    RESET = "reset"
    HANG = "hang"


class _Good:
    """The value of a field that a mode leaves as it is in a good answer."""

    def __repr__(self) -> str:
        return "GOOD"


GOOD: Final = _Good()


@dataclass(frozen=True)
class Raw:
    """Writes these bytes whatever was asked, `filler` so many times, and then `tail`.

    With `byte_s`, it writes a byte in each such time.
    """

    data: bytes = b""
    ending: Ending = Ending.KEEP
    filler: bytes = b""
    times: int = 0
    tail: bytes = b""
    byte_s: float = 0.0


@dataclass(frozen=True)
class Altered:
    """A good answer with some of it replaced.

    `headers` are added. `first` and `middle` are bytes between the events of a stream, before the first and after the
    second. `sends` is how much is sent before the ending: events of a stream, or else the share of the body in tenths.
    `length_off` is added to the content-length. `body` and `choices` replace those of an answer that is not streamed.
    """

    headers: tuple[tuple[bytes, bytes], ...] = ()
    finish_reason: Any = GOOD
    usage: Any = GOOD
    choices: Any = GOOD
    body: bytes | None = None
    done: bool = True
    ends: bool = True
    first: bytes = b""
    middle: bytes = b""
    filler_times: int = 0
    sends: int | None = None
    length_off: int = 0
    ending: Ending = Ending.KEEP


@dataclass(frozen=True)
class AtAccept:
    """Does it as soon as there is a connection. `HANG` reads nothing. With `full_backlog` there is no connection."""

    ending: Ending = Ending.HANG
    full_backlog: bool = False


@dataclass(frozen=True)
class Report:
    """Answers `/cache_state` with what `build` gives, or as `raw` says."""

    build: Callable[[], bytes] | None = None
    raw: Raw | None = None


@dataclass(frozen=True)
class Models:
    """Answers `/v1/models` and `/health` like this."""

    raw: Raw


Action = Raw | Altered | AtAccept | Report | Models


def response(status: int, body: bytes, *headers: tuple[bytes, bytes], media: bytes = b"application/json") -> bytes:
    """The bytes of a whole response."""
    fields = ((b"content-type", media), (b"content-length", b"%d" % len(body)), *headers)
    return b"HTTP/1.1 %d Said\r\n%b\r\n%b" % (status, b"".join(b"%b: %b\r\n" % field for field in fields), body)
