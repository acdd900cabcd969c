"""The instructions that a request takes in user space, counted by valgrind: a busy machine does not change them.

A gateway runs some fifty times slower meanwhile, so what it does by the clock (probes, the log's thread) takes a larger
part than in service. The figure serves to compare two checkouts.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.plain.routers import Router, plait_command, running_engine, running_router
from benchmarks.plain.rows import Row
from e2e.faults.raw_client import Client

START_S: Final = 300.0
WARM_UPS: Final = 4
"""Times that a row is sent before it is counted: the words of its prompts are learned by then."""

MOST_REQUESTS: Final = 30
"""The most requests of a row that are counted: a count needs no mean over many."""

_TOTALS: Final = re.compile(r"^totals: (\d+)", re.MULTILINE)


def main(rows: Sequence[Row], checkouts: Sequence[Path]) -> int:
    """Count for each checkout, and print a table; returns 2 without valgrind."""
    if shutil.which("valgrind") is None:
        print("valgrind counts the instructions: install it")
        return 2
    print("| instructions a request, thousands | " + " | ".join(row.name for row in rows) + " |")
    print("|---" * (len(rows) + 1) + "|")
    for checkout in checkouts:
        print(f"| {checkout.name} | " + " | ".join(f"{_counted(row, checkout) / 1e3:.0f}" for row in rows) + " |")
    return 0


def _counted(row: Row, checkout: Path) -> float:
    row = replace(row, requests=min(row.requests, MOST_REQUESTS))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        engine = stack.enter_context(running_engine(folder / "engine.log"))

        def command(port: int) -> list[str]:
            counting = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counted"]
            return [*counting, *plait_command("short", [engine], folder, port)]

        router = stack.enter_context(running_router("plait", command, folder, checkout, START_S))
        uvloop.run(_send(router, row))
        counted = [int(found[1]) for file in folder.glob("counted*") if (found := _TOTALS.search(file.read_text()))]
        return max(counted) / row.requests


async def _send(router: Router, row: Row) -> None:
    """Send a row's requests one after the other, the last of them counted."""
    numbers = count()
    async with Client(router.port, START_S) as client:
        for number in range(WARM_UPS + 1):
            if number == WARM_UPS:
                await asyncio.to_thread(_tell, router.pid, "-i", "on")
            for _ in range(row.requests):
                assert (await client.post(row.path, row.body(next(numbers)), row.headers)).status == 200
        await asyncio.to_thread(_tell, router.pid, "-i", "off")
        await asyncio.to_thread(_tell, router.pid, "-d")


def _tell(pid: int, *words: str) -> None:
    """Have valgrind do something to a process."""
    subprocess.run(["callgrind_control", *words, str(pid)], check=True, capture_output=True)  # noqa: S603, S607
