"""Which of several workers gets a connection, and that it comes whole to the one that gets it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from plait.gateway.server.balance import CLOSED, SILENT_LOOKS, Balance, Connections, Share

WORKERS = 3
OPEN: list[socket.socket] = []
"""The sockets of a test."""


class Accepted:
    """A connection that a worker has accepted: one end of a socket pair, on a port."""

    def __init__(self, port: int = 80) -> None:
        self.client, self._end = socket.socketpair()
        OPEN.extend((self.client, self._end))
        self._port = port
        self.is_closed = False

    async def received(self) -> bytes:
        """What the client gets, until the end."""
        reader, writer = await asyncio.open_connection(sock=self.client)
        found = await reader.read()
        writer.close()
        return found

    def get_extra_info(self, name: str) -> Any:
        return self._end if name == "socket" else ("127.0.0.1", self._port)

    def abort(self) -> None:
        self.is_closed = True
        self._end.close()


@pytest.fixture(autouse=True)
def no_socket_left() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def new_balance(workers: int) -> Balance:
    balance = Balance(workers, {80})
    OPEN.extend(end for way in balance._ways for end in way)
    return balance


@pytest.fixture
def shares() -> list[Share]:
    balance = new_balance(WORKERS)
    return [balance.of(number) for number in range(WORKERS)]


def connections(share: Share) -> Connections:
    return share._connections


def came(share: Share, times: int) -> None:
    for _ in range(times):
        share.came()


class Greeting(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


async def test_a_new_connection_goes_to_the_worker_that_has_the_fewest(shares: list[Share]) -> None:
    for share, count in zip(shares, (4, 2, 3), strict=True):
        share.open(Greeting)
        came(share, count)
    accepted: Any = Accepted()
    assert shares[0].hand_on(accepted)
    assert accepted.is_closed
    assert [connections(shares[0]).of(worker) for worker in range(WORKERS)] == [4, 3, 3], "it is on its way"
    assert await accepted.received() == b"hello"
    shares[1].came()
    assert [connections(shares[0]).of(worker) for worker in range(WORKERS)] == [4, 3, 3]


async def test_a_connection_stays_where_no_other_has_fewer(shares: list[Share]) -> None:
    for share in shares:
        share.open(Greeting)
        came(share, 2)
    accepted: Any = Accepted()
    assert not shares[1].hand_on(accepted)
    assert not accepted.is_closed


def test_connections_to_a_port_of_the_workers_own_are_not_for_all(shares: list[Share]) -> None:
    own: Any = Accepted(port=81)
    assert not shares[0].is_for_all(own)
    common: Any = Accepted()
    assert shares[0].is_for_all(common)


async def test_a_worker_that_stops_or_has_not_begun_gets_none(shares: list[Share]) -> None:
    first, second, _ = shares
    for share in (first, second):
        share.open(Greeting)
    came(first, 5)
    second.close()
    second.went()
    assert [connections(first).of(worker) for worker in range(WORKERS)] == [5, CLOSED, CLOSED]
    accepted: Any = Accepted()
    assert not first.hand_on(accepted)
    assert second.hand_on(accepted), "one that stops hands on what still comes"
    assert await accepted.received() == b"hello"


async def test_a_worker_is_silent_from_its_last_beat_on() -> None:
    balance = new_balance(WORKERS)
    shares = [balance.of(number) for number in range(WORKERS)]
    assert not balance.has_begun(1)
    assert [balance.silent_looks(1) for _ in range(3)] == [0, 0, 0], "it has not begun"
    for share in shares:
        share.open(asyncio.Protocol)
    assert balance.has_begun(1)
    assert [balance.silent_looks(1) for _ in range(SILENT_LOOKS)] == list(range(SILENT_LOOKS))
    assert connections(shares[0]).of(1) == 0
    assert balance.silent_looks(1) == SILENT_LOOKS
    assert connections(shares[0]).of(1) == CLOSED, "no other hands a connection to it"
    shares[1]._beat()
    assert balance.silent_looks(1) == 0
    assert connections(shares[0]).of(1) == 0
    balance.close(1)
    assert not balance.has_begun(1)


async def test_a_connection_waits_for_the_successor_of_a_worker_that_has_died() -> None:
    balance = new_balance(2)
    first, second = balance.of(0), balance.of(1)
    first.open(Greeting)
    second.open(Greeting)
    asyncio.get_running_loop().remove_reader(second._own)  # it has died in this moment
    first.came()
    accepted: Any = Accepted()
    assert first.hand_on(accepted)
    balance.close(1)
    balance.of(1).open(Greeting)
    assert await accepted.received() == b"hello"
    assert connections(first).of(1) == 0
