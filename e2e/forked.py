"""Python processes that are forks of one that has imported Plait: a gateway's start takes 0.2 s of CPU time, not 0.9.

Standard multiprocessing makes them. Each has a process id, signals and an exit status of its own, as if its command had
been started.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class ForkedPython:
    """`python -m MODULE ARGUMENTS`, with what tests use of `subprocess.Popen`. Its output is added to `log_path`."""

    def __init__(self, module: str, arguments: Sequence[str], log_path: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["e2e.preloaded"])
        call = (module, list(arguments), log_path, dict(os.environ))
        self._process = context.Process(target=_run, args=call, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit status, once it has ended. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("python", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(module: str, arguments: list[str], log_path: Path, environment: dict[str, str]) -> None:
    """Be the module's program."""
    os.environ.clear()
    os.environ.update(environment)
    with log_path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
