"""Clients that do not read their answers are disconnected, so that they do not hold an engine's place for ever.

The application notices nothing special: its client has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SLOWEST_BYTES = 64 * 1024
"""A client has to take this much in each time-out while as much waits for it: uvicorn's high-water mark.

So a client that reads one byte a minute is dropped too.
"""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SlowClients:
    """Drop a client that takes less than `SLOWEST_BYTES` in `timeout_s`. `on_dropped` is told of each."""

    timeout_s: float
    on_dropped: Callable[[], None]


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with an end to its patience. It costs nothing while the client reads."""

    def __init__(self, *args: Any, slow_clients: SlowClients | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._slow_clients = slow_clients
        self._unread_bytes = 0
        self._look: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The client has not read so much that the application has to wait."""
        super().pause_writing()
        if self._slow_clients is not None:
            self._watch(self._slow_clients)

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by either side."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self, slow_clients: SlowClients) -> None:
        self._forget()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._look = self.loop.call_later(slow_clients.timeout_s, self._on_time, slow_clients)

    def _on_time(self, slow_clients: SlowClients) -> None:
        if self._unread_bytes - self.transport.get_write_buffer_size() >= SLOWEST_BYTES:
            self._watch(slow_clients)
            return
        self._look = None
        log.info("slow client dropped", client=self.client and self.client[0], unread_bytes=self._unread_bytes)
        slow_clients.on_dropped()
        self.transport.abort()

    def _forget(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None
