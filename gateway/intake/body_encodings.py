"""Decodes compressed bodies (RFC 9110, 8.4) as they come, in pieces.

A few bytes may decode to a thousand times as many (a zip bomb), so the caller counts each piece before the next one.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from plait.backends.errors import CallerError, EncodingNotSupportedError
from plait.gateway.asgi import Headers

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE_BYTES: Final = 64 * 1024
"""The largest piece that is decoded at once."""

MOST_MEMBERS: Final = 1_000
"""The most members of a body. Each costs some microseconds, even an empty one."""

MOST_WINDOW_BYTES_LOG2: Final = 23
"""The largest window that a Zstandard frame may need: 8 MiB (RFC 9659)."""


class Decompressor(Protocol):
    """The decompressor of one member, with the interface of the standard library's `BZ2Decompressor`."""

    @property
    def eof(self) -> bool:
        """Whether the member has ended."""

    @property
    def needs_input(self) -> bool:
        """Whether all output of the data so far was returned."""

    @property
    def unused_data(self) -> bytes:
        """The bytes after the member's end."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Decode the buffered data, then `data`. Returns at most `max_length` bytes of output."""


class Deflated:
    """The `Decompressor` of a zlib, gzip or raw deflate member."""

    def __init__(self, window_bits: int) -> None:
        self._member = zlib.decompressobj(window_bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Raises `zlib.error`."""
        found = self._member.decompress(self._member.unconsumed_tail + data, max_length)
        self.needs_input = len(found) < max_length and not self._member.unconsumed_tail
        return found


def _gzip(_first: bytes) -> Decompressor:
    return Deflated(16 + zlib.MAX_WBITS)


def _deflate(first: bytes) -> Decompressor:
    """`deflate` means zlib's format, but some clients send raw deflate, whose first byte lacks zlib's method number."""
    return Deflated(zlib.MAX_WBITS if first[0] & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS)


def _zstd(_first: bytes) -> Decompressor:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MOST_WINDOW_BYTES_LOG2})


NEW: Final[dict[str, Callable[[bytes], Decompressor]]] = {"gzip": _gzip, "deflate": _deflate, "zstd": _zstd}
"""By encoding: makes the decompressor of a member from the member's first bytes, which may decide its format."""

TAKEN: Final = ", ".join(NEW)


class BodyDecoder:
    """Decodes one body, which may consist of several gzip members or Zstandard frames."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._member: Decompressor | None = None
        self._members = 0
        self._most_members = 1 if encoding == "deflate" else MOST_MEMBERS

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decode the next bytes of the body, and yield the output in pieces. Raises `CallerError` if malformed."""
        while data or not (self._member is None or self._member.needs_input):
            if self._member is None:
                self._members += 1
                if self._members > self._most_members:
                    raise self._malformed()
                self._member = NEW[self._encoding](data)
            try:
                found = self._member.decompress(data, PIECE_BYTES)
            except (zlib.error, zstd.ZstdError) as error:
                raise self._malformed() from error
            data = b""
            if self._member.eof:
                data, self._member = self._member.unused_data, None
            if found:
                yield found

    def end(self) -> None:
        """End the body. Raises `CallerError` if it is incomplete."""
        if self._member is not None:
            raise self._malformed()

    def _malformed(self) -> CallerError:
        return CallerError(f"The body is no {self._encoding}, as its Content-Encoding says.", code="malformed_encoding")


def decoder_of(headers: Headers) -> BodyDecoder | None:
    """The decoder of a request's body; None if it is not encoded. Raises `EncodingNotSupportedError`."""
    given = ",".join(value.decode("latin-1") for name, value in headers if name == b"content-encoding")
    named = [name for one in given.split(",") if (name := one.strip().lower()) not in ("", "identity")]
    if not named:
        return None
    encoding = named[0].removeprefix("x-")  # `x-gzip` is an old name
    if len(named) > 1 or encoding not in NEW:
        raise EncodingNotSupportedError(
            f"No body comes as '{given[:80]}' here. Use one of these alone: {TAKEN}.", TAKEN
        )
    return BodyDecoder(encoding)
