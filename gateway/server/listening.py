"""Listening sockets, bound before anything else starts, so that a port in use is reported at once."""

from __future__ import annotations

import asyncio
import errno
import select
import signal
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import structlog
import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from plait.gateway.log.events import wait_until_written

ACCEPTS = 32
"""Connections accepted in one iteration of the event loop, over all sockets. uvloop accepts one for each handle. With
one, a health check under load would wait some milliseconds for each connection before it."""

BACKLOG_S = 2.0
"""The longest time to accept the backlog when a server stops listening. Some 10,000 can be accepted in a second."""

log = structlog.get_logger(__name__)

_REASONS = {
    errno.EADDRINUSE: "another process listens there. Stop it, or choose another port",
    errno.EACCES: "ports below 1024 need more rights. Choose another port",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
}


def bound_sockets(host: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """A socket for each address of `host`, bound to `port` (0: any free one) and not listening yet.

    With `is_shared` (SO_REUSEPORT), others with it can be bound to the same port. Raises ValueError with the reason.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ValueError(f"cannot listen on {host}: {error.strerror}") from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(_bound(family, kind, protocol, address, is_shared=is_shared))
    except OSError as error:
        for opened in sockets:
            opened.close()
        reason = _REASONS.get(error.errno or 0, error.strerror)
        raise ValueError(f"cannot listen on {host}:{port}: {reason}") from error
    return sockets


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def accept_backlog(sockets: Collection[socket.socket]) -> None:
    """Wait until the event loop has accepted the backlog, which a close of the listening sockets would reset.

    New connections are accepted, too. Ends after `BACKLOG_S`.
    """
    waiting, ends_s = select.poll(), asyncio.get_running_loop().time() + BACKLOG_S
    for one in sockets:
        waiting.register(one, select.POLLIN)
    while waiting.poll(0) and asyncio.get_running_loop().time() < ends_s:  # noqa: ASYNC110 - the loop accepts them
        await asyncio.sleep(0)


class ListeningServer(uvicorn.Server):
    """uvicorn's server, which logs where it listens, and ends only after its log is written."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with several handles (duplicates) for each socket. asyncio's server closes its handle itself."""
        bound = sockets or []
        handles = [one.dup() for one in bound for _ in range(ACCEPTS // len(bound) - 1)]
        await super().startup([*bound, *handles])
        log.info("listening", urls=[url_of(one) for one in bound])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs. Signals are blocked while their handlers change.

        Afterwards uvicorn raises the signal again, so that SIGTERM ends the process by its default action.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with super().capture_signals():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
            yield
            wait_until_written()


def shared_sockets(host: str, port: int, shares: int) -> list[list[socket.socket]]:
    """`shares` groups of sockets on one port (SO_REUSEPORT). The kernel chooses a socket for each connection.

    Raises ValueError if the port cannot be used, also if another program would share it.
    """
    for alone in bound_sockets(host, port):  # without sharing first: fails if another program shares the port
        port = alone.getsockname()[1]
        alone.close()
    return [bound_sockets(host, port, is_shared=True) for _ in range(shares)]


def _bound(family: int, kind: int, protocol: int, address: object, *, is_shared: bool) -> socket.socket:
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 gets its own socket
        opened.bind(address)  # type: ignore[arg-type]
    except OSError:
        opened.close()
        raise
    return opened
