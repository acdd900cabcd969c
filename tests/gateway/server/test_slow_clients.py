"""When a client is too slow: the timer against a transport whose buffer the test sets."""

from __future__ import annotations

from typing import Any, cast

import pytest

from plait.gateway.server.slow_clients import SLOWEST_BYTES, Patience, SlowClients


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


class Client:
    def __init__(self) -> None:
        self.dropped = 0
        self.transport = Transport()
        self.patience = Patience(SlowClients(1e6, self._on_dropped), cast("Any", self.transport))

    def _on_dropped(self) -> None:
        self.dropped += 1

    @property
    def is_awaited(self) -> bool:
        """Whether the time-out runs."""
        return self.patience._timer is not None

    def elapse(self, unread_bytes: int) -> bool:
        """The time-out passes, and the client has left so much unread; whether it was dropped."""
        self.transport.unread_bytes = unread_bytes
        assert self.is_awaited
        self.patience._on_time()
        assert self.dropped == self.transport.is_aborted
        return self.transport.is_aborted


@pytest.fixture
async def paused() -> Client:
    client = Client()
    client.transport.unread_bytes = 10 * SLOWEST_BYTES
    client.patience.start()
    return client


async def test_who_reads_nothing_is_dropped_once(paused: Client) -> None:
    assert paused.elapse(10 * SLOWEST_BYTES)
    paused.patience.stop()
    assert (paused.dropped, paused.is_awaited) == (1, False)


async def test_who_reads_slowly_is_dropped_when_it_stops(paused: Client) -> None:
    assert not paused.elapse(9 * SLOWEST_BYTES)
    assert not paused.elapse(8 * SLOWEST_BYTES)
    assert paused.elapse(7 * SLOWEST_BYTES + 1)


async def test_nobody_waits_for_who_reads_or_has_gone(paused: Client) -> None:
    paused.patience.stop()
    assert not paused.is_awaited
