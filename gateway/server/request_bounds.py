"""Limits on clients: the number of connections, and the headers, bytes and time of each request.

Synchronous, without a socket: the connection reports what the parser found, and asks for the deadline. The limit of
connections comes from the configuration and from the process's limit of file descriptors.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice
from math import inf
from typing import Final, Protocol

import structlog

from plait.backends.errors import CallerError, HeadersTooLargeError, RequestTimeoutError, TooManyConnectionsError
from plait.gateway.asgi import NAME

MIN_BODY_BYTES_S = 64 * 1024
"""A body may take `body_timeout_s` plus 1 s for each 64 KiB: half a megabit per second is a poor mobile link. So 32 MiB
may take ten minutes, but a client that sends single bytes gets little more than `body_timeout_s`."""

CHUNK_BYTES = 4
"""The two line ends of a chunk. Bytes beyond these, the data and its size in hexadecimal are a chunk extension."""

LINE_END_BYTES = 4
"""The `: ` and the line end of a header."""

LINE_BYTES = 64
"""Uncounted bytes of a request: its method and version, or the size line of a chunk that has not ended."""

DRAIN_S = 10.0
"""The time for the rest of a body after its answer: some clients read the answer only when they have sent all."""

Header = tuple[bytes, bytes]

SPARE_CONNECTIONS: Final = 100
"""The most connections above the limit that get a 503 (fewer if there are few file descriptors). More are aborted."""

OTHER_DESCRIPTORS: Final = 200
"""File descriptors for the spare connections, probes, listeners and files."""

ENOUGH: Final = 0.95
"""With this part of `max_connections`, nobody needs advice: a limit of 20,000 descriptors is enough for 10,000."""

LEAST_IDLE_S: Final = 1.0
"""A connection is not closed for a new one before it is idle for as long: its next request may be on its way."""

LOOKED_AT: Final = 64
"""So many of the longest idle connections, and of the oldest strangers, are looked at for one to close."""

STRANGERS_PART: Final = 4
"""More strangers than one in so many connections get no `LEAST_IDLE_S`. A quarter of 10,000 is enough for 2,500 new
connections a second, and the others stay for clients with a key."""

LAST_DESCRIPTORS: Final = 16
"""Descriptors that no client's connection gets. Without any left, the event loop would close new connections unseen."""

LINE_INTERVAL_S: Final = 60.0
"""The least time between log lines about refused connections."""

NOFILE: Final = resource.RLIMIT_NOFILE

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """See `ServerConfig`."""

    max_headers: int = 128
    max_header_bytes: int = 64 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0


class Part(Enum):
    """What the client sends next."""

    NOTHING = "nothing"
    HEAD = "head"
    BODY = "body"


class RequestBounds:
    """The limits on the request that a connection reads.

    `deadline_s` is when the present `part` has to be whole; None while a whole request has no answer. The owner of the
    parser adds to `body_bytes`, sets `part` when the request is whole, and the deadline when it is answered. Methods
    raise `CallerError` for a request over a limit, or one that servers parse differently (request smuggling).

    Chunk extensions are not reported by the parser. They are found as raw bytes that nothing else explains.
    """

    def __init__(self, limits: RequestLimits, now_s: float) -> None:
        self.part = Part.NOTHING
        self.deadline_s: float | None = now_s + limits.header_timeout_s
        self.body_bytes = 0  # body bytes so far
        self._limits = limits
        self._begun = False  # whether a head has begun, after empty lines
        self._raw_bytes = 0  # bytes from the network for this request, and for earlier ones in the same packet
        self._headers = 0  # number of headers and trailers
        self._head_bytes = 0  # bytes of target, headers and trailers; 0 until the head has ended
        self._framing_bytes = 0  # bytes of the chunks' framing
        self._chunked_bytes = 0  # body bytes in chunks that have ended
        self._timed_bytes = 0  # body bytes that have extended the deadline
        self._is_answered = False  # the rest of the body is discarded

    def __repr__(self) -> str:
        return f"RequestBounds({self.part.value}, deadline_s={self.deadline_s})"

    def head(self, version: str, target: bytes, headers: Sequence[Header], now_s: float) -> None:
        """The parser found the end of a head. Checks what RFC 9112 requires (3.2, 6.1)."""
        if self._head_bytes:  # an earlier request was in the same packet
            self._raw_bytes -= self._head_bytes + self.body_bytes + self._framing_bytes
        self.body_bytes = self._framing_bytes = self._chunked_bytes = self._timed_bytes = 0
        self._is_answered = False
        names = list(map(NAME, headers))
        size = len(target) + LINE_END_BYTES * len(headers) + sum(map(len, chain.from_iterable(headers)))
        self._headers, self._head_bytes = len(headers), size
        hosts = names.count(b"host")
        if hosts > 1 or (not hosts and version == "1.1"):
            raise CallerError("The request has no 'Host' header, or several. Send one.", code="invalid_http")
        if b"transfer-encoding" in names and (_encoding(headers) != b"chunked" or version != "1.1"):
            raise CallerError(
                "The request's 'Transfer-Encoding' is not 'chunked' alone, or it is not HTTP/1.1. Send the body with a "
                "'Content-Length' instead.",
                code="invalid_http",
            )
        if len(headers) > self._limits.max_headers or size > self._limits.max_header_bytes:
            raise self._too_large()
        self.part = Part.BODY
        self.deadline_s = now_s + self._limits.body_timeout_s

    def chunk_ended(self) -> None:
        """The parser found the end of a chunk of the body."""
        self._framing_bytes += len(f"{self.body_bytes - self._chunked_bytes:x}") + CHUNK_BYTES
        self._chunked_bytes = self.body_bytes

    def trailer(self, name: bytes, value: bytes) -> None:
        """The parser found a header behind the body."""
        self._headers += 1
        self._head_bytes += len(name) + len(value) + LINE_END_BYTES
        if self._headers > self._limits.max_headers or self._head_bytes > self._limits.max_header_bytes:
            raise self._too_large()

    def parsed(self, size: int, now_s: float, *, begun: bool) -> None:
        """The parser has read `size` bytes. `begun`: a head has begun and not ended.

        Raises for too long chunk extensions and unfinished heads.
        """
        self._raw_bytes += size
        body_bytes = self.body_bytes + self._framing_bytes
        unexplained_bytes = self._raw_bytes - body_bytes
        if self.part is Part.BODY:
            assert self.deadline_s is not None
            if not self._is_answered:
                self.deadline_s += (self.body_bytes - self._timed_bytes) / MIN_BODY_BYTES_S
            self._timed_bytes = self.body_bytes
        elif self._head_bytes and not begun:  # a request is whole
            self.deadline_s = None
            self._raw_bytes = self._head_bytes = 0
        else:
            if self._head_bytes:  # the request before is whole
                self._raw_bytes -= self._head_bytes + body_bytes
                self._head_bytes = 0
            unexplained_bytes = self._raw_bytes
            if self.part is Part.NOTHING or begun > self._begun:
                self.deadline_s = now_s + self._limits.header_timeout_s
            self.part, self._begun = Part.HEAD, begun
        if unexplained_bytes > self._limits.max_header_bytes + LINE_BYTES:
            raise self._too_large()

    def answered(self, now_s: float) -> None:
        """The request is answered. The rest of its body is discarded, for `DRAIN_S` at most."""
        if self.part is Part.BODY and self.deadline_s is not None:
            self._is_answered = True
            self.deadline_s = min(self.deadline_s, now_s + DRAIN_S)

    def excuse(self, now_s: float) -> float:
        """Extend the deadline, because the server has paused reading. Returns the new deadline."""
        is_body = self.part is Part.BODY
        self.deadline_s = now_s + (self._limits.body_timeout_s if is_body else self._limits.header_timeout_s)
        return self.deadline_s

    def overdue(self) -> CallerError | None:
        """The error at the deadline; None if no request has begun."""
        if self.part is Part.NOTHING:
            return None
        what, key_s = ("body", self._limits.body_timeout_s) if self.part is Part.BODY else (
            "headers", self._limits.header_timeout_s
        )  # fmt: skip
        rate = f", plus 1 s for each {MIN_BODY_BYTES_S} bytes of it" if self.part is Part.BODY else ""
        return RequestTimeoutError(f"The request's {what} did not come within {key_s:g} s{rate}. Send it faster.")

    def _too_large(self) -> HeadersTooLargeError:
        if self._headers > self._limits.max_headers:
            return HeadersTooLargeError(
                f"The request has more than {self._limits.max_headers} headers. Send fewer.", code="too_many_headers"
            )
        return HeadersTooLargeError(
            f"The request's target, headers, trailers and chunk extensions have more than "
            f"{self._limits.max_header_bytes} bytes. Send less.",
        )


def _encoding(headers: Sequence[Header]) -> bytes:
    first, *more = (value for name, value in headers if name == b"transfer-encoding")
    return b"several" if more else first.strip().lower()


class Closable(Protocol):
    """A connection that may be closed for a new one."""

    @property
    def transport(self) -> asyncio.Transport: ...


class ConnectionBounds:
    """The limit of clients' connections. `descriptors` is the process's limit of file descriptors.

    Where clients need a key, a connection is a stranger until a request on it has had a valid one.

    The kernel gives a new descriptor the lowest free number, so a high number means that few are left.
    """

    def __init__(self, max_connections: int, descriptors: float = inf) -> None:
        self.max_connections = max_connections
        self.idle: dict[Closable, float] = {}  # since when; the longest idle one first
        self.strangers: dict[Closable, float] = {}  # since when; the oldest first
        self._spare = min(SPARE_CONNECTIONS, descriptors // 16)
        self._last_descriptor = descriptors - LAST_DESCRIPTORS
        self._refused = 0
        self._logged_s = -inf

    def check(self, connections: int, descriptor: int, now_s: float) -> None:
        """Check a new connection, of `connections` in all. Raises `TooManyConnectionsError`.

        Beyond `max_connections`, the oldest stranger is closed instead, whatever it has sent, or else the one that is
        idle for longest: its client can open another.
        """
        if connections > self.max_connections:
            if not self.is_far_above(connections) and self._close_one(now_s):
                return
            self._log("max_connections", connections, now_s)
            raise TooManyConnectionsError(
                f"This gateway serves at most {self.max_connections} connections at one time. Try again later.",
                retry_after_s=1.0,
            )
        if descriptor >= self._last_descriptor:
            self._close_one(now_s)  # for the client's next try: this connection keeps its high descriptor
            self._log("file descriptors", connections, now_s)
            raise TooManyConnectionsError(
                "This gateway has no file descriptor for another connection. Try again.", retry_after_s=1.0
            )

    def _close_one(self, now_s: float) -> bool:
        """Close a connection for a new one. False: there is none."""
        grace_s = 0.0 if len(self.strangers) > self.max_connections // STRANGERS_PART else LEAST_IDLE_S
        one = min(_until(now_s - grace_s, self.strangers), key=_unsent_bytes, default=None)  # the first of equal ones
        if one is None:
            one = next((idle for idle in _until(now_s - LEAST_IDLE_S, self.idle) if not _unsent_bytes(idle)), None)
        if one is None:
            return False
        self.strangers.pop(one, None)
        self.idle.pop(one, None)
        one.transport.abort()  # not `close`, which may take until the client has read
        return True

    def is_far_above(self, connections: int) -> bool:
        """Whether to abort a new connection without an answer."""
        return connections > self.max_connections + self._spare

    def _log(self, why: str, connections: int, now_s: float) -> None:
        self._refused += 1
        if now_s - self._logged_s >= LINE_INTERVAL_S:
            log.warning("connections refused", too_few=why, refused=self._refused, connections=connections)
            self._refused, self._logged_s = 0, now_s


def _until(until_s: float, since: dict[Closable, float]) -> Iterator[Closable]:
    return (one for one, since_s in islice(since.items(), LOOKED_AT) if since_s <= until_s)


def _unsent_bytes(one: Closable) -> int:
    return one.transport.get_write_buffer_size()


def bounds_by_descriptors(max_connections: int) -> ConnectionBounds:
    """The limit for this process, whose soft limit of file descriptors is raised as far as needed and allowed.

    If that is not enough, clients get fewer connections than `max_connections`, which is logged. Each client's call
    needs a second connection, to an engine; without a descriptor for it, engines would seem to be down.
    """
    soft, hard = (inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(NOFILE))
    needed = 2 * max_connections + OTHER_DESCRIPTORS
    if soft < needed:
        soft = min(hard, needed)
        resource.setrlimit(NOFILE, (int(soft), resource.RLIM_INFINITY if hard == inf else int(hard)))
    if soft >= needed:
        return ConnectionBounds(max_connections, soft)
    allowed = int(max(soft // 8, (soft - OTHER_DESCRIPTORS) // 2))
    if allowed >= ENOUGH * max_connections:
        return ConnectionBounds(allowed, soft)
    log.warning(
        "too few file descriptors for max_connections: raise ulimit -n",
        descriptors=int(soft),
        needed=needed,
        connections=allowed,
        max_connections=max_connections,
    )
    return ConnectionBounds(allowed, soft)
