"""The connections of workers on one port, spread evenly: a worker that has more than another hands a new one on.

The system gives each connection to a worker by chance: of eight, one of two workers often has six. A connection stays
where it is, so that worker would do most of the work. Envoy calls the same an exact balance.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from mmap import mmap
from typing import Final

CLOSED: Final = -1
"""In the place of a number of connections: the worker takes none."""

BEAT_S: Final = 0.5
"""The time between two signs of life of a worker, which its event loop gives."""

SILENT_LOOKS: Final = 4
"""After so many looks without a sign of life, which are `BEAT_S` apart, a worker gets no more connections of others."""

_NUMBER_BYTES: Final = 8


class Connections:
    """How many connections each of some workers has, in memory that processes share. Each number has one writer.

    `open` has those of each worker, and is written by that worker, as `taken` is: how many it has taken from others,
    and `beats`: its signs of life. `silent` has the looks of the workers' parent since the last one. `sent` has how
    many each has sent to each. What was sent and not taken yet is on its way.
    """

    def __init__(self, workers: int) -> None:
        numbers = memoryview(mmap(-1, workers * (workers + 4) * _NUMBER_BYTES)).cast("q")
        rows = [numbers[first : first + workers] for first in range(0, len(numbers), workers)]
        self.open, self.taken, self.beats, self.silent, *self.sent = rows

    def of(self, worker: int) -> int:
        """Those of a worker, with those on their way to it; `CLOSED` if it takes none."""
        has = CLOSED if self.silent[worker] >= SILENT_LOOKS else self.open[worker]
        return has if has == CLOSED else has + sum(row[worker] for row in self.sent) - self.taken[worker]


class Balance:
    """The connections of some workers, and a way to each worker. It is made before the workers are.

    `ports` are those that they share. A connection that is sent to a worker that has just died waits for the next one
    in its place.
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
        """What the worker with this number has of it."""
        return Share(number, self._ports, self._connections, self._ways[number][0], [end for _, end in self._ways])

    def close(self, number: int) -> None:
        self._connections.open[number] = CLOSED
        self._connections.beats[number] = self._connections.silent[number] = 0

    def has_begun(self, number: int) -> bool:
        """Whether a worker's event loop has run."""
        return self._connections.beats[number] > 0

    def silent_looks(self, number: int) -> int:
        """Look at a worker; returns how many looks in a row have found no sign of life. Before the first: none.

        Looks are counted and not seconds: a machine that has slept has had no looks.
        """
        beats, silent = self._connections.beats[number], self._connections.silent
        silent[number] = silent[number] + 1 if beats and beats == self._seen[number] else 0
        self._seen[number] = beats
        return silent[number]


class Share:
    """One worker's part: its connections are counted, and a new one beyond its share is handed on.

    It takes connections from `own`, and `ways` lead to all workers.
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
        """Take what others hand on from now on; each connection gets a protocol."""
        self._connections.open[self._number] = 0
        asyncio.get_running_loop().add_reader(self._own, self._take, new_protocol)
        self._beat()

    def close(self) -> None:
        """Hand on all new connections, as long as another worker takes some."""
        self._connections.open[self._number] = CLOSED

    def is_for_all(self, transport: asyncio.Transport) -> bool:
        """Whether a connection may be handed on, and counts. Those of other workers have ports of their own."""
        return transport.get_extra_info("sockname")[1] in self._ports

    def came(self) -> None:
        self._count(1)

    def went(self) -> None:
        self._count(-1)

    def hand_on(self, transport: asyncio.Transport) -> bool:
        """Give a connection that has not come yet to the worker that has the fewest. Returns whether it has gone.

        It must not have been read from. It is closed here if it has gone.
        """
        counts = [(count, worker) for worker in range(len(self._ways)) if (count := self._connections.of(worker)) >= 0]
        fewest, taker = min(counts, default=(0, self._number))
        if taker == self._number or fewest == self._connections.of(self._number):
            return False
        try:
            socket.send_fds(self._ways[taker], [b"c"], [transport.get_extra_info("socket").fileno()])
        except OSError:  # so many are on their way there that it takes no more
            return False
        self._connections.sent[self._number][taker] += 1
        transport.abort()
        return True

    def _beat(self) -> None:
        """Give a sign of life now and from time to time."""
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
            with suppress(OSError):  # the client has gone meanwhile
                await asyncio.get_running_loop().connect_accepted_socket(new_protocol, connection)
        finally:
            self._connections.taken[self._number] += 1
