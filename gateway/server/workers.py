"""Worker processes: several gateways on one port, under a parent that starts, watches, restarts and drains them.

Each worker has its own listening sockets on the port (SO_REUSEPORT), and may pass a new connection on (`balance`). The
parent keeps all sockets open, so that connections to a dead worker wait for its successor. A worker without a heartbeat
is killed and restarted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from socket import socket
from typing import Final, NoReturn

import structlog

from plait.gateway.server.balance import BEAT_S, Balance, Share

EVENTS: Final = frozenset((signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""The signals that the parent waits for. All but the first are forwarded to the workers."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""The backoff before a restart. It doubles as long as the worker ends soon after its start."""

STEADY_S: Final = 30.0
"""A worker that ran for this long resets the backoff."""

MOST_SILENT_LOOKS: Final = 19
"""A worker without a heartbeat for 9.5 s is killed, and its successor serves 2 s later. No work of a healthy worker
blocks its event loop for so long."""

USER_ERROR: Final = 2
"""The exit status of a process whose configuration cannot be used."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker: its number (from 0), its listening sockets, and its side of the connection balancing (`share`).

    `parent` is a pipe that becomes readable when the parent has ended. A single process has neither.
    """

    number: int
    sockets: Sequence[socket]
    parent: int | None = None
    share: Share | None = None


@dataclass(slots=True)
class _Slot:
    """The state of one worker. `due_s` is when to start it, unless it runs (`pid`)."""

    sockets: Sequence[socket]
    pid: int | None = None
    started_s: float = 0.0
    due_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S


class WorkerProcesses:
    """Runs `serve` in a process for each group of `sockets`. The process that calls `run` may have one thread only.

    Connections to the `ports` are balanced. `on_hangup` is called at SIGHUP, before the workers get the signal.
    """

    def __init__(
        self,
        sockets: Sequence[Sequence[socket]],
        ports: Collection[int],
        serve: Callable[[Worker], None],
        on_hangup: Callable[[], object] = lambda: None,
    ) -> None:
        self._slots = [_Slot(group) for group in sockets]
        self._balance = Balance(len(sockets), ports)
        self._serve = serve
        self._on_hangup = on_hangup
        self._is_stopping = False
        self._begun: set[int] = set()  # workers that have served once; if all have, the configuration is valid
        self._look_s = 0.0
        self._parent, self._alive = os.pipe()  # the second end closes with this process

    def run(self) -> int:
        """Keep the workers running until a signal ends them. Returns the exit status.

        In a forked worker it does not return: it raises SystemExit, or what `serve` raises.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, EVENTS)
        status = 0
        while not self._is_stopping or any(slot.pid is not None for slot in self._slots):
            self._start_due()
            self._look()
            came = signal.sigtimedwait(EVENTS, self._pause_s())
            if came is not None and came.si_signo != signal.SIGCHLD:
                self._pass_on(came.si_signo)
            status = self._reap() or status
        return status

    def _pause_s(self) -> float:
        """Seconds until the next worker is due, or the next look at those that run."""
        due = [slot.due_s for slot in self._slots if slot.pid is None and not self._is_stopping]
        return max(0.0, min([self._look_s, *due]) - time.monotonic())

    def _look(self) -> None:
        """Each `BEAT_S`, look at the heartbeats of the workers, and kill silent ones."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + BEAT_S
        for number, slot in enumerate(self._slots):
            self._note_begun(number)
            if slot.pid is not None and self._balance.silent_looks(number) >= MOST_SILENT_LOOKS:
                log.error("a worker is silent and is ended", worker=number, pid=slot.pid)
                os.kill(slot.pid, signal.SIGKILL)

    def _note_begun(self, number: int) -> None:
        if self._balance.has_begun(number):
            self._begun.add(number)

    def _start_due(self) -> None:
        now_s = time.monotonic()
        for number, slot in enumerate(self._slots):
            if slot.pid is None and slot.due_s <= now_s and not self._is_stopping:
                slot.started_s = now_s
                slot.pid = os.fork()
                if not slot.pid:
                    self._be_worker(number)

    def _be_worker(self, number: int) -> NoReturn:
        """Serve, in a new process."""
        os.setpgid(0, 0)  # so that Ctrl-C goes to the parent alone
        os.close(self._alive)
        sockets = self._slots[number].sockets
        for slot in self._slots:
            if slot.sockets is not sockets:
                for other in slot.sockets:
                    other.close()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server listens: its default would end the process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, EVENTS)
        self._serve(Worker(number, sockets, self._parent, self._balance.of(number)))
        raise SystemExit(0)

    def _pass_on(self, signal_number: int) -> None:
        """Forward a signal to all workers. SIGTERM or SIGINT also ends restarts; a second one ends workers at once."""
        if signal_number == signal.SIGHUP:
            self._on_hangup()
        else:
            self._stop()
        for slot in self._slots:
            if slot.pid is not None:
                os.kill(slot.pid, signal_number)

    def _stop(self) -> None:
        """Start no more workers, and close the parent's listening sockets.

        Otherwise connections would still queue on the sockets of a worker that has closed its own.
        """
        self._is_stopping = True
        for slot in self._slots:
            for listening in slot.sockets:
                listening.close()

    def _reap(self) -> int:
        """Collect the workers that have ended. Returns the exit status if the configuration is unusable, else 0."""
        wrong = 0
        for number, slot in enumerate(self._slots):
            if slot.pid is not None:
                pid, status = os.waitpid(slot.pid, os.WNOHANG)
                if pid:
                    wrong = max(wrong, self._ended(number, slot, os.waitstatus_to_exitcode(status)))
        if wrong:
            self._pass_on(signal.SIGTERM)
        return wrong

    def _ended(self, number: int, slot: _Slot, status: int) -> int:
        """Schedule the restart of a worker. Returns the exit status if its configuration is unusable, else 0."""
        now_s, pid, slot.pid = time.monotonic(), slot.pid, None
        self._note_begun(number)
        self._balance.close(number)
        if self._is_stopping:
            return 0
        if now_s - slot.started_s >= STEADY_S:
            slot.pause_s = FIRST_PAUSE_S
        if status == USER_ERROR and len(self._begun) < len(self._slots):
            return status
        slot.due_s = now_s + slot.pause_s
        log.error("a worker has ended", worker=number, pid=pid, status=status, started_again_in_s=slot.pause_s)
        slot.pause_s = min(LONGEST_PAUSE_S, 2 * slot.pause_s)
        return 0
