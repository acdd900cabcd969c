"""Runs Plait's servers under uvicorn. The gateway's server stops in steps, so that each client gets an answer."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from types import FrameType
from typing import Any, Protocol, cast

import structlog
import uvicorn
from starlette.types import ASGIApp

from plait.gateway.server.balance import Share
from plait.gateway.server.connection import ClientBounds, Connection, Server
from plait.gateway.server.full_collections import FullCollections
from plait.gateway.server.listening import ListeningServer, accept_backlog
from plait.gateway.server.signals import end_process

BACKLOG = 16_384
"""The listen backlog, if the kernel allows as many. Beyond it, a client's SYN is retried after a second."""

AFTER_CUT_S = 2
"""Seconds that requests get to end after `cut`. Then uvicorn cancels them."""

LINGER_S = 0.5
"""The time between the close of the listener and of idle connections: a connection accepted last may still send."""

log = structlog.get_logger(__name__)


class Stoppable(Protocol):
    """An application that takes part in the steps of a stop."""

    def begin_stop(self) -> None:
        """Called after the signal, while the server still listens."""

    def on_closed(self) -> None:
        """Called when the server does not listen any more and idle connections are closed. Running requests go on."""

    def cut(self) -> None:
        """Called after the grace period: running requests have to end now."""


@dataclass(frozen=True, slots=True)
class Stops:
    """How the server stops `app`, and what SIGHUP does."""

    app: Stoppable
    drain_delay_s: float
    """How long the server listens after SIGTERM."""
    grace_s: float
    """How long running requests may take after that."""
    on_hangup: Callable[[], None]
    parent: int | None = None
    """A file descriptor that becomes readable when the parent process has ended; the server then stops."""
    share: Share | None = None
    """The worker's side of the connection balancing."""


class DrainingServer(ListeningServer):
    """A server that stops in steps. At SIGTERM: listen for `drain_delay_s`, then let requests run for `grace_s`.

    SIGINT, which comes from a person, skips the delay. A second signal, or one before the server listens, ends the
    process at once.
    """

    def __init__(self, config: uvicorn.Config, stops: Stops) -> None:
        super().__init__(config)
        self._stops = stops
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, handle SIGHUP, and let `FullCollections` control the garbage collector."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        FullCollections(self._loop).start()
        self._loop.add_signal_handler(signal.SIGHUP, self._stops.on_hangup)
        if self._stops.parent is not None:
            self._loop.add_reader(self._stops.parent, self._on_parent_gone, self._stops.parent)
        if self._stops.share is not None:
            connect = cast("Callable[..., Connection]", self.config.http_protocol_class)
            state = {"server_state": self.server_state, "app_state": self.lifespan.state}
            self._stops.share.open(partial(connect, **state, may_hand_on=False))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_stopping or self._loop is None:
            end_process(sig, frame)
            return
        self._is_stopping = True
        self._loop.call_soon_threadsafe(self._begin_stop, sig)

    def _on_parent_gone(self, parent: int) -> None:
        assert self._loop is not None
        self._loop.remove_reader(parent)
        if not self._is_stopping:
            self.handle_exit(signal.SIGTERM, None)

    def _begin_stop(self, sig: int) -> None:
        assert self._loop is not None
        delay_s = 0.0 if sig == signal.SIGINT else self._stops.drain_delay_s
        log.info("stopping", signal=signal.Signals(sig).name, listens_for_s=delay_s, grace_s=self._stops.grace_s)
        self._stops.app.begin_stop()
        if self._stops.share is not None:
            self._stops.share.close()
        self._loop.call_later(delay_s, super().handle_exit, sig, None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        await accept_backlog(sockets or ())
        for server in self.servers:
            server.close()
        loop.call_later(self._stops.grace_s, self._stops.app.cut)
        await asyncio.sleep(LINGER_S)
        loop.call_soon(self._stops.app.on_closed)  # runs when the base class has closed what is idle
        await super().shutdown(sockets)


def run_draining_server(app: ASGIApp, sockets: Sequence[socket.socket], stops: Stops, bounds: ClientBounds) -> None:
    """Serve on bound sockets until SIGINT or SIGTERM, then stop as `stops` says. `app` has its own `OpenRequests`."""
    host, port = sockets[0].getsockname()[:2]
    cancels_s = ceil(stops.grace_s) + AFTER_CUT_S
    config = new_config(app, bounds, host=host, port=port, timeout_graceful_shutdown=cancels_s)
    run(DrainingServer(config, stops), list(sockets))


def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
    """Serve on bound sockets until SIGINT or SIGTERM."""
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has stopped
        server.run(sockets)


def new_config(app: ASGIApp, bounds: ClientBounds, **options: Any) -> uvicorn.Config:
    """The uvicorn configuration of a server with Plait's `Connection`s; `options` are uvicorn's."""
    connect = partial(_connect, app, bounds)
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=connect,  # type: ignore[arg-type]  # uvicorn calls it in place of a protocol class
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing uses a client's address or scheme
        backlog=BACKLOG,
        **options,
    )


def _connect(
    app: ASGIApp,
    bounds: ClientBounds,
    *,
    server_state: Server,
    app_state: dict[str, Any],
    may_hand_on: bool = True,
    **_uvicorn: object,
) -> Connection:
    """A client's connection. uvicorn calls this in place of a protocol class, with its own `config` and `_loop`, too.

    uvicorn owns the `server_state`, and calls `shutdown` of each connection in it when it stops.
    """
    return Connection(app, bounds, server_state, app_state, may_hand_on=may_hand_on)
