"""How many connections the process may have: by configuration, and by the file descriptors that the system gives it."""

from __future__ import annotations

import resource
from math import inf
from typing import Final

import structlog

from plait.backends.errors import TooManyConnectionsError

SPARE_CONNECTIONS: Final = 100
"""Connections above the limit that are told so, or fewer if there are few file descriptors. More are closed without a
word."""

OTHER_DESCRIPTORS: Final = 200
"""Of file descriptors: for the spare connections, probes, listeners and files."""

LAST_DESCRIPTORS: Final = 16
"""No connection of a client gets one of these. Without any left, the event loop closes new connections unseen."""

LINE_INTERVAL_S: Final = 60.0
"""Between lines in the log about refused connections."""

NOFILE: Final = resource.RLIMIT_NOFILE

log = structlog.get_logger(__name__)


class ConnectionBounds:
    """The clients' connections of one server: at most `max_connections`. The process may have so many `descriptors`.

    A new descriptor has the lowest number that is free, so one with a high number says that few are left.
    """

    def __init__(self, max_connections: int, descriptors: float = inf) -> None:
        self._max_connections = max_connections
        self._spare = min(SPARE_CONNECTIONS, descriptors // 16)
        self._last_descriptor = descriptors - LAST_DESCRIPTORS
        self._refused = 0
        self._logged_s = -inf

    def check(self, connections: int, descriptor: int, now_s: float) -> None:
        """A connection has come, which is the last of so many. Raises `TooManyConnectionsError`."""
        if connections > self._max_connections:
            self._log("max_connections", connections, now_s)
            raise TooManyConnectionsError(
                f"This gateway serves at most {self._max_connections} connections at one time. "
                "Close idle ones, or try again later.",
                retry_after_s=1.0,
            )
        if descriptor >= self._last_descriptor:
            self._log("file descriptors", connections, now_s)
            raise TooManyConnectionsError(
                "This gateway has no file descriptor for another connection. Close idle ones, or try again later.",
                retry_after_s=1.0,
            )

    def is_far_above(self, connections: int) -> bool:
        """Whether so many are above the limit that another one is not even told."""
        return connections > self._max_connections + self._spare

    def _log(self, why: str, connections: int, now_s: float) -> None:
        self._refused += 1
        if now_s - self._logged_s >= LINE_INTERVAL_S:
            log.warning("connections refused", too_few=why, refused=self._refused, connections=connections)
            self._refused, self._logged_s = 0, now_s


def bounds_by_descriptors(max_connections: int) -> ConnectionBounds:
    """Bounds for this process, whose limit of file descriptors is raised as far as that is needed and allowed.

    If it is not enough, clients get fewer connections than `max_connections`, which is logged. The call of each needs
    another connection, to an engine: without, engines would seem to be down.
    """
    soft, hard = (inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(NOFILE))
    needed = 2 * max_connections + OTHER_DESCRIPTORS
    if soft < needed:
        soft = min(hard, needed)
        resource.setrlimit(NOFILE, (int(soft), resource.RLIM_INFINITY if hard == inf else int(hard)))
    if soft >= needed:
        return ConnectionBounds(max_connections, soft)
    allowed = int(max(soft // 8, (soft - OTHER_DESCRIPTORS) // 2))
    log.warning(
        "too few file descriptors for max_connections: raise ulimit -n",
        descriptors=int(soft),
        needed=needed,
        connections=allowed,
        max_connections=max_connections,
    )
    return ConnectionBounds(allowed, soft)
