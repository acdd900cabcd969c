"""Connection balancing between worker processes on one port (Envoy: exact balance).

With SO_REUSEPORT, the kernel gives each connection to a worker by a hash: of eight connections, one of two workers
often has six, and keeps them. So a worker with more connections than another passes a new one on, as a file descriptor
over a socket pair. The counts are in shared memory, in which each number has one writer, so that no lock is needed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from mmap import mmap
from typing import Final

CLOSED: Final = -1
"""The count of a worker that takes no connections."""

BEAT_S: Final = 0.5
"""The period of a worker's heartbeats, which its event loop sends."""

SILENT_LOOKS: Final = 4
"""After this many looks (`BEAT_S` apart) without a heartbeat, a worker gets no more connections from others."""

_NUMBER_BYTES: Final = 8


class Connections:
    """Counters by worker in shared memory. Each number has one writer.

    A worker writes its `open` connections, the connections `taken` from others, its heartbeats `beats`, and its row of
    `sent`: the connections that it has sent to each other worker. The parent writes `silent`: its looks since a
    worker's last heartbeat. Connections that were sent and not yet taken are in transit.
    """

    def __init__(self, workers: int) -> None:
        numbers = memoryview(mmap(-1, workers * (workers + 4) * _NUMBER_BYTES)).cast("q")
        rows = [numbers[first : first + workers] for first in range(0, len(numbers), workers)]
        self.open, self.taken, self.beats, self.silent, *self.sent = rows

    def of(self, worker: int) -> int:
        """A worker's connections, with those in transit to it; `CLOSED` if it takes none."""
        has = CLOSED if self.silent[worker] >= SILENT_LOOKS else self.open[worker]
        return has if has == CLOSED else has + sum(row[worker] for row in self.sent) - self.taken[worker]


class Balance:
    """The counters and the socket pairs of all workers. The parent makes it before it forks.

    `ports` are the shared ones. A connection sent to a worker that has just died waits in the socket pair for its
    successor.
    """

    def __init__(self, workers: int, ports: Collection[int]) -> None:
        self._ports = frozenset(ports)
        self._connections = Connections(workers)
        self._ways = [socket.socketpair() for _ in range(workers)]
        self._seen = [0] * workers  # the beats at the last look
        for number, way in enumerate(self._ways):
            self.close(number)
            for end in way:
                end.setblocking(False)

    def of(self, number: int) -> Share:
        return Share(number, self._ports, self._connections, self._ways[number][0], [end for _, end in self._ways])

    def close(self, number: int) -> None:
        self._connections.open[number] = CLOSED
        self._connections.beats[number] = self._connections.silent[number] = 0

    def has_begun(self, number: int) -> bool:
        """Whether a worker's event loop has run."""
        return self._connections.beats[number] > 0

    def silent_looks(self, number: int) -> int:
        """Look at a worker. Returns the number of looks in a row without a new heartbeat; 0 before its first.

        Looks are counted instead of seconds, because a machine that was suspended has had no looks.
        """
        beats, silent = self._connections.beats[number], self._connections.silent
        silent[number] = silent[number] + 1 if beats and beats == self._seen[number] else 0
        self._seen[number] = beats
        return silent[number]


class Share:
    """One worker's side: counts its connections, passes on a new one beyond its share, and takes those from others.

    It receives from the socket `own`; `ways` are the sockets to all workers.
    """

    def __init__(
        self,
        number: int,
        ports: Collection[int],
        connections: Connections,
        own: socket.socket,
        ways: list[socket.socket],
    ) -> None:
        self._number = number
        self._ports = ports
        self._connections = connections
        self._own = own
        self._ways = ways
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, new_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Start to take connections from others; each gets a protocol."""
        self._connections.open[self._number] = 0
        asyncio.get_running_loop().add_reader(self._own, self._take, new_protocol)
        self._beat()

    def close(self) -> None:
        """Take none any more, and pass on all new connections as long as another worker takes some."""
        self._connections.open[self._number] = CLOSED

    def is_for_all(self, transport: asyncio.Transport) -> bool:
        """Whether a connection is on a shared port, so that it counts and may be passed on."""
        return transport.get_extra_info("sockname")[1] in self._ports

    def came(self) -> None:
        self._count(1)

    def went(self) -> None:
        self._count(-1)

    def hand_on(self, transport: asyncio.Transport) -> bool:
        """Pass a new connection on to the worker with the fewest. Returns whether it was sent; then it is closed here.

        Nothing may have been read from it, and it must not be counted yet.
        """
        counts = [(count, worker) for worker in range(len(self._ways)) if (count := self._connections.of(worker)) >= 0]
        fewest, taker = min(counts, default=(0, self._number))
        if taker == self._number or fewest == self._connections.of(self._number):
            return False
        try:
            socket.send_fds(self._ways[taker], [b"c"], [transport.get_extra_info("socket").fileno()])
        except OSError:  # the socket pair is full of connections in transit
            return False
        self._connections.sent[self._number][taker] += 1
        transport.abort()
        return True

    def _beat(self) -> None:
        """Send a heartbeat now and each `BEAT_S`."""
        self._connections.beats[self._number] += 1
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _count(self, more: int) -> None:
        if self._connections.open[self._number] != CLOSED:
            self._connections.open[self._number] += more

    def _take(self, new_protocol: Callable[[], asyncio.Protocol]) -> None:
        with suppress(BlockingIOError):
            _, descriptors, _, _ = socket.recv_fds(self._own, 1, 1)
            for descriptor in descriptors:
                task = asyncio.ensure_future(self._connect(socket.socket(fileno=descriptor), new_protocol))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket, new_protocol: Callable[[], asyncio.Protocol]) -> None:
        connection.setblocking(False)
        try:
            with suppress(OSError):  # the client has disconnected
                await asyncio.get_running_loop().connect_accepted_socket(new_protocol, connection)
        finally:
            self._connections.taken[self._number] += 1
