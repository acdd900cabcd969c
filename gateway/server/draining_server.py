"""uvicorn's server, stopped in steps, so that no client is left without an answer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Protocol, cast

import structlog
import uvicorn

from plait.gateway.server.balance import Share
from plait.gateway.server.full_collections import FullCollections
from plait.gateway.server.http_protocol import BoundedProtocol
from plait.gateway.server.listening import ListeningServer

LINGER_S = 0.5
"""Between the listener's end and that of idle connections: the request of one accepted last may be on its way."""

log = structlog.get_logger(__name__)


class Stoppable(Protocol):
    """An application that is told how far the server has stopped."""

    def begin_stop(self) -> None:
        """A signal has come. The server still listens."""

    def on_closed(self) -> None:
        """The server listens no more, and idle connections are closed. Running requests go on."""

    def cut(self) -> None:
        """The grace is over: running requests have to end now."""


@dataclass(frozen=True, slots=True)
class Stops:
    """How the server stops `app`, and what SIGHUP does.

    It stops as by SIGTERM, too, once the file descriptor `parent` can be read: the process that started it has ended.
    A server that is one of several has its `share` of their connections.
    """

    app: Stoppable
    drain_delay_s: float
    grace_s: float
    on_hangup: Callable[[], None]
    parent: int | None = None
    share: Share | None = None


class DrainingServer(ListeningServer):
    """At SIGTERM it listens for `drain_delay_s` more. Then running requests have `grace_s` to end.

    SIGINT, which comes from a person, skips the delay. A second signal ends the process at once.
    """

    def __init__(self, config: uvicorn.Config, stops: Stops) -> None:
        super().__init__(config)
        self._stops = stops
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. From now on SIGHUP is handled, and the garbage collector runs as `FullCollections` says."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        FullCollections(self._loop).start()
        self._loop.add_signal_handler(signal.SIGHUP, self._stops.on_hangup)
        if self._stops.parent is not None:
            self._loop.add_reader(self._stops.parent, self._on_parent_gone, self._stops.parent)
        if self._stops.share is not None:
            self._stops.share.open(self._new_protocol)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal asks to stop."""
        if self._is_stopping:
            signal.signal(sig, signal.SIG_DFL)
            os.kill(os.getpid(), sig)
            return
        self._is_stopping = True
        if self._loop is None:
            super().handle_exit(sig, frame)
        else:
            self._loop.call_soon_threadsafe(self._begin_stop, sig)

    def _new_protocol(self) -> asyncio.Protocol:
        """Of a connection that another worker has handed on."""
        new = cast("Callable[..., BoundedProtocol]", self.config.http_protocol_class)
        protocol = new(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        protocol.may_hand_on = False
        return protocol

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
        """Listen no more, and end."""
        loop = asyncio.get_running_loop()
        for _ in range(3):  # connections that wait to be accepted would be reset
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        loop.call_later(self._stops.grace_s, self._stops.app.cut)
        await asyncio.sleep(LINGER_S)
        loop.call_soon(self._stops.app.on_closed)  # runs when the base class has closed what is idle
        await super().shutdown(sockets)
