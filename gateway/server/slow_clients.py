"""Drops clients that do not read their answers: backpressure would keep their engines' slots occupied for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

SLOWEST_BYTES: Final = 64 * 1024
"""A client has to read this much in each time-out while its write buffer is above the high-water mark (the same size).

So a client that reads one byte a minute is dropped, too.
"""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SlowClients:
    """Drop a client that reads less than `SLOWEST_BYTES` in `timeout_s`. `on_dropped` is called for each."""

    timeout_s: float
    on_dropped: Callable[[], None]


class Patience:
    """The timer of one connection, which runs only while the write buffer is full."""

    __slots__ = ("_slow_clients", "_timer", "_transport", "_unread_bytes")

    def __init__(self, slow_clients: SlowClients, transport: asyncio.Transport) -> None:
        self._slow_clients = slow_clients
        self._transport = transport
        self._unread_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The write buffer is above the high-water mark."""
        self.stop()
        self._unread_bytes = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._slow_clients.timeout_s, self._on_time)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self._timer = None
        if self._unread_bytes - self._transport.get_write_buffer_size() >= SLOWEST_BYTES:
            self.start()
            return
        peer = self._transport.get_extra_info("peername")
        log.info("slow client dropped", client=peer and peer[0], unread_bytes=self._unread_bytes)
        self._slow_clients.on_dropped()
        self._transport.abort()
