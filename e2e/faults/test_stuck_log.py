"""Readers of the log that stop to read or go, and disks that are full: no call and no end of the gateway notices."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.rolling_load import chat, client, post
from e2e.server_process import STOPPED_BY_SIGTERM, Server, eventually
from e2e.servers import Fleet, Launcher
from tests.waiting import SLOWNESS, WITHIN_S

CALLS, CLIENTS = 400, 8
"""Some 200 kB of log. A pipe takes 64 KiB."""
DRAIN_DELAY_S, GRACE_S = 1.0 * SLOWNESS, 2.0 * SLOWNESS
LOST = {"gone": "EPIPE", "full": "ENOSPC"}

LOGGING = """
import structlog
from plait.gateway.log.events import configure_logging, write_stderr_in_background
write_stderr_in_background()
configure_logging("info", "json")
for number in range(int({lines})):
    structlog.get_logger().info("working", number=number)
"""
CRASHING = LOGGING + "raise RuntimeError('a defect')\n"
FORKING = LOGGING + "import os\nif os.fork() == 0:\n    structlog.get_logger().info('child')\nelse:\n    os.wait()\n"


@contextmanager
def reader(kind: str) -> Iterator[int]:
    """A process's stderr whose reader is `stuck` or `gone`, or a file on a `full` disk."""
    if kind == "full":
        with Path("/dev/full").open("wb") as full:
            yield full.fileno()
        return
    reading, writing = os.pipe()
    if kind == "gone":
        os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)
        if kind == "stuck":
            os.close(reading)


def started(launch: Launcher, stderr: int, form: str) -> Fleet:
    engine = launch.engine("a", time_scale=1000)
    engine.stderr = stderr
    server = {"drain_delay_s": DRAIN_DELAY_S, "shutdown_grace_s": GRACE_S}
    gateway = launch.gateway([engine], server=server, log={"format": form})
    gateway.stderr = stderr
    fleet = Fleet(gateway, {"a": engine})
    fleet.start()
    return fleet


def lost_lines(gateway: Server, reason: str) -> float:
    return gateway.metric("plait_log_lines_dropped_total", reason=reason)


@pytest.mark.parametrize(
    ("kind", "form"), [("stuck", "json"), ("stuck", "console"), ("gone", "json"), ("full", "json")]
)
async def test_calls_go_on_and_the_gateway_stops_in_its_steps(launch: Launcher, kind: str, form: str) -> None:
    with reader(kind) as stderr:
        fleet = await asyncio.to_thread(started, launch, stderr, form)
        gateway = fleet.gateway
        async with client(gateway) as http, asyncio.timeout(WITHIN_S):

            async def work() -> list[str]:
                return [(await post(http, chat("Hello", 1))).how for _ in range(CALLS // CLIENTS)]

            ended = await asyncio.gather(*(work() for _ in range(CLIENTS)))
            assert ended == [["complete"] * (CALLS // CLIENTS)] * CLIENTS
            assert (await asyncio.to_thread(gateway.get, "/health")).status_code == 200
            if kind in LOST:
                await asyncio.to_thread(eventually, lambda: lost_lines(gateway, LOST[kind]) >= CALLS)
            assert lost_lines(gateway, "full") == 0, "what is not read yet has room"

            began_s = time.monotonic()
            gateway.terminate()
            await asyncio.to_thread(eventually, lambda: gateway.get("/ready").status_code == 503)
            assert (await post(http, chat("Hello", 1))).how == "complete"
        assert await asyncio.to_thread(gateway.wait) in STOPPED_BY_SIGTERM
        assert time.monotonic() - began_s >= DRAIN_DELAY_S
        await asyncio.to_thread(fleet.engines["a"].stop)


def test_the_last_lines_are_written(launch: Launcher) -> None:
    gateway = launch.gateway([launch.engine("a")])
    gateway.start()
    eventually(lambda: '"listening"' in gateway.log())
    gateway.stop()
    assert "Finished server process" in gateway.log().splitlines()[-1]


def test_a_gateway_without_a_stderr_serves(launch: Launcher) -> None:
    engine = launch.engine("a")
    gateway = launch.gateway([engine])
    gateway._command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *gateway._command]
    Fleet(gateway, {"a": engine}).start()
    assert gateway.post("/v1/chat/completions", json=chat("Hello", 1)).status_code == 200


def run(program: str, lines: int, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program.format(lines=lines)], stderr=stderr)


@pytest.mark.parametrize("program", [CRASHING, FORKING])
def test_a_process_that_ends_writes_what_it_has_logged(program: str) -> None:
    with run(program, 2000, subprocess.PIPE) as process:
        assert process.stderr is not None
        written = process.stderr.read().decode()
    numbers = [
        line.rpartition('"number":')[2].partition(",")[0] for line in written.splitlines() if '"working"' in line
    ]
    assert numbers == [str(number) for number in range(2000)]
    if program is CRASHING:
        assert written.endswith("RuntimeError: a defect\n")
        assert written.index("Traceback") > written.rindex('"working"')
    assert process.returncode == (1 if program is CRASHING else 0)


@pytest.mark.parametrize("program", [CRASHING, FORKING])
def test_a_process_ends_although_nobody_reads(program: str) -> None:
    with reader("stuck") as stderr, run(program, 2000, stderr) as process:
        eventually(lambda: process.poll() is not None)
    assert process.returncode == (1 if program is CRASHING else 0)
