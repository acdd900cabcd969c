"""A `plait` process that a test starts, asks and stops, and waiting for what comes of it."""

from __future__ import annotations

import os
import resource
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from e2e.forked import ForkedPython
from tests.waiting import WITHIN_S

PLAIT = Path(sys.executable).with_name("plait")
PYTHON_MODULE = [sys.executable, "-m"]
POLL_S, MOST_POLL_S = 0.005, 0.03
"""Between two looks, which get rarer as the wait gets longer: a look takes 2 ms of CPU time from what is awaited."""
LOGGED_AFTER_S = 0.1
STOPPED_BY_SIGTERM = {0, -signal.SIGTERM}
STOPPED = STOPPED_BY_SIGTERM | {-signal.SIGINT}

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP: loading the system's certificates would take them 20 ms each."""

WORKERS = int(os.environ.get("PLAIT_TEST_WORKERS", "1"))
"""Processes of each gateway that has a configuration: all must look as one to clients."""

STARTED: list[Server] = []
"""Every server of this test run, so that its end can check that none is left."""


class Server:
    """One `plait` process. Its stderr goes to `log_path`; `ready_path` answers 200 once it can be used.

    `processes`: how many processes count for themselves in its metrics.
    """

    def __init__(
        self,
        name: str,
        port: int,
        arguments: Sequence[str],
        log_path: Path,
        *,
        ready_path: str,
        processes: int = WORKERS,
    ) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self.may_log_tracebacks = False
        self.stderr: int | None = None
        """A file descriptor for its stderr in place of the log."""
        self._command = [*PYTHON_MODULE, "plait.gateway.cli", *arguments]
        self._ready_path = ready_path
        self.processes = processes
        self._process: subprocess.Popen[bytes] | ForkedPython | None = None
        self._is_interrupted = False
        STARTED.append(self)

    @property
    def running(self) -> bool:
        """Whether the process exists."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        """The process's resident memory."""
        assert self._process is not None
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def start(self) -> None:
        """Start the process, again after it has ended; does not wait for it."""
        assert not self.running
        command = self._command
        if command[:2] == PYTHON_MODULE and self.stderr is None:
            self._process = ForkedPython(command[2], command[3:], self.log_path)
        else:
            with self.log_path.open("ab") as log:
                stderr = log if self.stderr is None else self.stderr
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=stderr)
        self._is_interrupted = False

    def wait_until_ready(self) -> None:
        """Return once it answers; raises `AssertionError` with its log if it ended or the deadline passed."""
        try:
            eventually(lambda: not self.running or self.get(self._ready_path).status_code == 200)
        except (httpx.HTTPError, AssertionError) as error:
            raise AssertionError(f"{self.name} is not ready: {error}\n{self.log_tail()}") from error
        assert self.running, f"{self.name} ended at its start:\n{self.log_tail()}"

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM); does not wait."""
        self._send(signal.SIGTERM)

    def interrupt(self) -> None:
        """Ask it to stop without a delay if it runs (SIGINT); does not wait."""
        if self.running:
            self.signal(signal.SIGINT)
            self._is_interrupted = True

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._send(number)

    def kill(self) -> None:
        """End it without warning (SIGKILL)."""
        self._send(signal.SIGKILL)
        Server.wait(self)

    def wait(self) -> int:
        """The exit status of a process that is about to end."""
        assert self._process is not None
        return self._process.wait(WITHIN_S)

    def _send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop a running server; raises `AssertionError` if it has to be killed or has logged a traceback."""
        if self.running:
            if not self._is_interrupted:  # a second signal would end it at once
                self.terminate()
            try:
                status = self.wait()
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"{self.name} did not stop:\n{self.log_tail()}") from None
            assert status in STOPPED, f"{self.name} ended with {status}:\n{self.log_tail()}"
        assert self.may_log_tracebacks or "Traceback" not in self.log(), f"{self.name} failed on the way:\n{self.log()}"

    def log(self) -> str:
        """What it wrote to stderr so far. It writes in the background."""
        if self.running:
            time.sleep(LOGGED_AFTER_S)
        return self.log_path.read_text() if self.log_path.exists() else ""

    def log_tail(self, lines: int = 25) -> str:
        """The end of that."""
        return "\n".join(self.log().splitlines()[-lines:])

    def get(self, path: str, **options: Any) -> httpx.Response:
        """A GET over a connection of its own."""
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """A POST over a connection of its own."""
        return self.request("POST", path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request over a connection of its own; no status is an error here."""
        return httpx.request(method, self.url + path, trust_env=False, verify=NO_TLS, timeout=WITHIN_S, **options)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        lines = [line for line in self.get("/metrics").text.splitlines(keepends=True) if line.startswith(name)]
        families = text_string_to_metric_families("".join(lines))  # it takes milliseconds for all lines
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def eventually(holds: Callable[[], bool], deadline_s: float = WITHIN_S) -> None:
    """Return once `holds()`; raises what prevents it at the deadline: an `httpx.HTTPError`, or `AssertionError`."""
    ends_s, pause_s = time.monotonic() + deadline_s, POLL_S
    while True:
        failure: Exception | None = None
        try:
            if holds():
                return
        except httpx.HTTPError as error:
            failure = error
        if time.monotonic() > ends_s:
            raise failure or AssertionError(f"still not so after {deadline_s:g} s")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, MOST_POLL_S)
