"""When a client is too slow: the protocol's timer against a transport whose buffer the test sets."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from plait.gateway.server.http_protocol import SLOWEST_BYTES, PatientProtocol, SlowClients


class Transport:
    def __init__(self) -> None:
        self.unread_bytes = 0
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def abort(self) -> None:
        self.is_aborted = True

    def get_extra_info(self, _name: str) -> None:
        return None

    def close(self) -> None:
        """uvicorn closes what is lost."""


async def _nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    """An application."""


class Connection:
    def __init__(self) -> None:
        self.dropped = 0
        self.transport = Transport()
        self.protocol = PatientProtocol(
            uvicorn.Config(_nothing, log_config=None, lifespan="off"),
            ServerState(),
            {},
            asyncio.get_running_loop(),
            slow_clients=SlowClients(1e6, self._on_dropped),
        )
        self.protocol.connection_made(cast("Any", self.transport))

    def _on_dropped(self) -> None:
        self.dropped += 1

    def elapse(self, unread_bytes: int) -> bool:
        """The time-out passes, and the client has left so much unread; whether it was dropped."""
        self.transport.unread_bytes = unread_bytes
        assert self.protocol._look is not None
        self.protocol._on_time(SlowClients(1e6, self._on_dropped))
        assert self.dropped == self.transport.is_aborted
        return self.transport.is_aborted


@pytest.fixture
async def paused() -> Connection:
    connection = Connection()
    connection.transport.unread_bytes = 10 * SLOWEST_BYTES
    connection.protocol.pause_writing()
    return connection


async def test_who_reads_nothing_is_dropped_once(paused: Connection) -> None:
    assert paused.elapse(10 * SLOWEST_BYTES)
    paused.protocol.connection_lost(None)
    assert (paused.dropped, paused.protocol._look) == (1, None)


async def test_who_reads_slowly_is_dropped_when_it_stops(paused: Connection) -> None:
    assert not paused.elapse(9 * SLOWEST_BYTES)
    assert not paused.elapse(8 * SLOWEST_BYTES)
    assert paused.elapse(7 * SLOWEST_BYTES + 1)


@pytest.mark.parametrize("event", ["resumes", "goes"])
async def test_nobody_waits_for_who_reads_or_has_gone(paused: Connection, event: str) -> None:
    if event == "resumes":
        paused.protocol.resume_writing()
    else:
        paused.protocol.connection_lost(None)
    assert paused.protocol._look is None
