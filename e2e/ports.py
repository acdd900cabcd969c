"""Free ports for servers that are started later.

A port that the system chooses is one of those that outgoing connections get. So another connection may have taken it
when the server starts. These ports are below that range. A process has a part of them to itself, also beside other test
runs, and gives each of them once before it begins again.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Final

PORTS: Final = range(20_000, 32_000)
"""Linux gives 32,768 and higher to outgoing connections."""

PART: Final = 600
"""Ports of a process. 20 processes of a user can have a part at the same time."""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Adjacent ports that nobody listens on at the moment. Raises `AssertionError` if there are none."""
    for _ in range(PART // count):
        ports = list(islice(_candidates(os.getpid()), count))
        if ports[-1] - ports[0] == count - 1 and _are_free(ports):
            return ports
    raise AssertionError("no free ports")


@cache
def _candidates(_pid: int) -> Iterator[int]:
    """The ports of this process, again and again. A process that was forked has others than its parent."""
    return cycle(_own_part())


def _own_part() -> range:
    """A part that no process has. Raises `AssertionError` if all are taken."""
    folder = Path(tempfile.gettempdir(), f"plait-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    parts = [range(first, first + PART) for first in PORTS[::PART]]
    begin = os.getpid() % len(parts)  # so that ports rest for a while between two test runs
    for part in [*parts[begin:], *parts[:begin]]:
        lock = os.open(folder / str(part.start), os.O_RDWR | os.O_CREAT)  # stays open: the lock ends with the process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return part
    raise AssertionError(f"{len(parts)} processes have all ports of tests")


def _are_free(ports: list[int]) -> bool:
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
