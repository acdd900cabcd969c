"""One scripted engine: its names, its mode, its count of calls, and the socket that it listens on."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from e2e.faults.pace import Pace
from e2e.faults.plan import Plan

BACKLOG = 1024
TRIAL_ID = b"plait-trial"
"""The ids of the gateway's own calls begin with this. They are counted apart."""


@dataclass
class Stats:
    """Calls so far. `hits` counts how often a mode struck, and `native` the calls of another API than completions.

    `accepted_s` are the times of connections, `arrivals_s` those of the clients' calls, and `answered_s` those of their
    good answers.

    Times are by the machine's monotonic clock.
    """

    hits: int = 0
    begun: int = 0
    finished: int = 0
    aborted: int = 0
    trials: int = 0
    native: int = 0
    healthy: int = 0
    accepted_s: list[float] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)

    def report(self, *, times: bool) -> dict[str, Any]:
        """For `GET /stats`."""
        counts: dict[str, Any] = {
            "begun": self.begun,
            "finished": self.finished,
            "aborted": self.aborted,
            "trials": self.trials,
            "native": self.native,
        }
        counts |= {"hits": self.hits, "open": self.begun - self.finished - self.aborted, "well": self.healthy}
        if not times:
            return counts
        return counts | {"accepted_s": self.accepted_s, "arrivals_s": self.arrivals_s, "answered_s": self.answered_s}

    def begin(self, *, is_trial: bool) -> None:
        """A call arrived."""
        self.begun += 1
        if is_trial:
            self.trials += 1
        else:
            self.arrivals_s.append(time.monotonic())

    def end(self, *, is_aborted: bool, is_good: bool) -> None:
        """A call ended. `is_good` says that it got a good answer and is a client's."""
        self.aborted += is_aborted
        self.finished += not is_aborted
        if is_good and not is_aborted:
            self.healthy += 1
            self.answered_s.append(time.monotonic())


class ListeningSocket:
    """Accepts connections, unless its backlog is held full."""

    def __init__(self, port: int, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio then turns Nagle off
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self._socket.listen(BACKLOG)
        self._socket.setblocking(False)
        self._fillers: list[socket.socket] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop.add_reader(self._socket, self._accept)

    def hold_full(self) -> None:
        """Accept nothing more, and let nobody connect."""
        if self._fillers:
            return
        self._loop.remove_reader(self._socket)
        self._socket.listen(0)
        for _ in range(2):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(self._socket.getsockname())
            self._fillers.append(filler)

    def accept_again(self) -> None:
        """End `hold_full`."""
        if not self._fillers:
            return
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()
        self._socket.listen(BACKLOG)
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                connection, _address = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            task = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class Engine:
    """An engine and its connections. `idle` are those that carry no call."""

    def __init__(
        self, name: str, models: list[str], pace: Pace, *, routes: Sequence[str] = (), has_metrics: bool = False
    ) -> None:
        self.name = name
        self.models = models
        self.pace = pace
        self.routes = routes
        """Beside those of completions, which every engine has."""
        self.has_metrics = has_metrics
        self._tokens = 0
        self.plan = Plan()
        self.stats = Stats()
        self.socket: ListeningSocket | None = None
        self.connections: dict[Any, bool] = {}
        """Those that are open, and whether each carries a call."""

    def metrics(self) -> bytes:
        """For `GET /metrics`, under vLLM's names. Between two looks at it, each running call gets a token."""
        running = self.stats.begun - self.stats.finished - self.stats.aborted
        self._tokens += 0 if self.plan.modes else running
        return b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\nvllm:generation_tokens_total %d\n" % (
            running,
            self._tokens,
        )

    def change(self, plan: Plan) -> None:
        """Follow another plan. Connections without a call are closed if the plan is about connections."""
        self.plan = plan
        if plan.is_at_accept:
            for connection, is_busy in list(self.connections.items()):
                if not is_busy:
                    connection.close()
        assert self.socket is not None
        if plan.full_backlog:
            self.stats.hits += 1
            self.socket.hold_full()
        else:
            self.socket.accept_again()
