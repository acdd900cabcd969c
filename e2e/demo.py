"""`plait demo` as a process of its own, on ports that are free."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from e2e.server_process import PLAIT
from tests.waiting import WITHIN_S


@contextmanager
def demo(
    port: int,
    engine_port: int,
    *,
    plait: Path = PLAIT,
    folder: Path | None = None,
    before: Sequence[str] = (),
    stderr: IO[str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """The demo, while the context lasts; `plait` starts it, in `folder`, by the command `before` if there is one."""
    command = [*before, str(plait), "demo", f"--port={port}", f"--engine-port={engine_port}", "--time-scale=20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=folder) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(WITHIN_S)


def refused(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
