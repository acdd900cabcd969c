"""Free ports for servers that are started later.

A port that the system chooses is one of those that outgoing connections get. So another connection may have taken it
when the server starts. These ports are below that range, and a process gives each of them once before it begins again.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from itertools import cycle, islice
from typing import Final

PORTS: Final = range(20_000, 32_000)
"""Linux gives 32,768 and higher to outgoing connections."""

WORKERS: Final = 4
"""Test processes that may run at the same time (`pytest -n`). Each has a part of the ports for itself."""


def _own() -> range:
    """The ports of this process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    size = len(PORTS) // WORKERS
    return PORTS[size * (int(worker.removeprefix("gw")) % WORKERS) :][:size] if worker else PORTS


_OWN: Final = _own()
_begin: Final = os.getpid() * 61 % len(_OWN)  # test runs at the same time begin in different places
_candidates: Final = cycle([*_OWN[_begin:], *_OWN[:_begin]])


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Adjacent ports that nobody listens on at the moment. Raises `AssertionError` if there are none."""
    for _ in range(len(_OWN) // count):
        ports = list(islice(_candidates, count))
        if ports[-1] - ports[0] == count - 1 and _are_free(ports):
            return ports
    raise AssertionError("no free ports")


def _are_free(ports: list[int]) -> bool:
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
