"""SIGTERM and SIGINT to a gateway that does not listen yet end it at once, also if it is process 1 of a container."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.ports import free_port
from e2e.server_process import PLAIT, POLL_S
from tests.waiting import WITHIN_S

AS_PROCESS_1 = [
    "unshare",
    *([] if os.getuid() == 0 else ["--user", "--map-root-user"]),
    "--pid",
    "--fork",
    "--kill-child",
]

DELAYS_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Between the first moment of the command's own and the signal. A start takes about a second."""

AT_ONCE = 3
"""Gateways that start at the same time."""

CONFIG = """
[server]
port = {port}
workers = {workers}
drain_delay_s = 0
[[engines]]
url = "http://127.0.0.1:1"
"""


@dataclass(frozen=True)
class Starting:
    """A gateway that has just been started. `pid` is the one here of its first process."""

    process: asyncio.subprocess.Process
    pid: int

    def handles(self, number: int) -> bool:
        """Whether the process has a handler for a signal."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (number - 1) & 1)

    def has_loaded(self, package: str) -> bool:
        """Whether it has imported a package that has a library of its own."""
        return f"/{package}/" in Path(f"/proc/{self.pid}/maps").read_text()

    async def begins(self) -> None:
        """Return once it has a handler for SIGTERM. Raises `AssertionError` if it has imported anything before."""
        while True:
            has_loaded, handles = self.has_loaded("msgspec"), self.handles(signal.SIGTERM)
            assert handles or not has_loaded
            if handles:
                return
            await asyncio.sleep(POLL_S)

    async def status(self) -> int:
        """Its exit status, once it has ended. Raises TimeoutError."""
        return await asyncio.wait_for(self.process.wait(), WITHIN_S)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def starting(folder: Path, workers: int, *, as_process_1: bool) -> AsyncIterator[Starting]:
    port = free_port()
    config = folder / f"{port}.toml"
    config.write_text(CONFIG.format(port=port, workers=workers))
    command = [*(AS_PROCESS_1 if as_process_1 else ()), str(PLAIT), "serve", "--config", str(config)]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=quiet, stdout=quiet, stderr=quiet)
    pid = process.pid
    try:
        if as_process_1:
            await until(lambda: bool(children_of(process.pid)))
            [pid] = children_of(process.pid)
        yield Starting(process, pid)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await process.wait()


async def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(POLL_S)


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skip where no process may be the first of a namespace."""
    try:
        tried = subprocess.run([*AS_PROCESS_1, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare (util-linux) is not installed")
    if tried.returncode:
        pytest.skip(f"no namespace of processes: {tried.stderr.decode().strip()}")


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("workers", [1, 2])
async def test_process_1_hears_sigterm_before_it_imports_anything(tmp_path: Path, workers: int) -> None:
    async with starting(tmp_path, workers, as_process_1=True) as gateway:
        async with asyncio.timeout(WITHIN_S):
            await gateway.begins()
        os.kill(gateway.pid, signal.SIGTERM)
        assert await gateway.status() == 128 + signal.SIGTERM


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_process_1_ends_at_once_at_any_moment_of_its_start(tmp_path: Path, number: signal.Signals) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def status(workers: int, delay_s: float) -> tuple[int, bool]:
        """Its exit status, and whether it had imported next to nothing when it got the signal."""
        async with turns, starting(tmp_path, workers, as_process_1=True) as gateway:
            await until(lambda: gateway.handles(signal.SIGTERM))
            await asyncio.sleep(delay_s)
            is_early = not gateway.has_loaded("msgspec")
            os.kill(gateway.pid, number)
            return await gateway.status(), is_early

    cases = [(workers, delay_s) for workers in (1, 2) for delay_s in DELAYS_S]
    ended = dict(zip(cases, await asyncio.gather(*(status(*case) for case in cases)), strict=True))
    assert {status for status, _ in ended.values()} <= {0, 128 + number}, ended
    for workers in (1, 2):
        early = {status for case, (status, is_early) in ended.items() if is_early and case[0] == workers}
        assert early == {128 + number}, ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_no_worker_outlives_a_start_that_a_signal_ends(tmp_path: Path, number: signal.Signals) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def status(delay_s: float) -> int:
        async with turns, starting(tmp_path, 2, as_process_1=False) as gateway:
            await until(lambda: bool(children_of(gateway.pid)))
            await asyncio.sleep(delay_s)
            workers = children_of(gateway.pid)
            os.kill(gateway.pid, number)
            status = await gateway.status()
            assert not any(map(is_there, workers))
            return status

    ended = await asyncio.gather(*map(status, (0.0, 0.1, 0.3)))
    assert set(ended) == {0}, ended
