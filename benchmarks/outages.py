"""Gateways that share a store, while these or the store fail: `python -m benchmarks outages`.

Three gateways over a PostgreSQL, and clients that send each request to a random one. `--kills` ends one of them by
SIGKILL, `--restarts` restarts all one by one, `--away` stops the database for so many seconds, each time beside
programs and plain calls. Says how long the others took to go on, and what was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

from e2e.postgresql.outages import TAKEN_OVER_WITHIN_S, Outages
from e2e.postgresql.server import ABSENT, binaries, shared_postgres, stop_shared_postgres
from e2e.servers import Launcher


def main() -> int:
    """Run and print; returns 1 if something was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--restarts", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--away", type=float, default=30.0, metavar="SECONDS", help="default: %(default)s; 0: not")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    arguments = parser.parse_args()
    if binaries() is None:
        print(ABSENT)
        return 2
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder)) as launch:
        lost = asyncio.run(_run(launch, arguments))
    stop_shared_postgres()
    return int(lost)


async def _run(launch: Launcher, arguments: argparse.Namespace) -> bool:
    outages = Outages(launch, random.Random(arguments.seed))
    await outages.start()
    async with outages.plain_calls() as plain:
        for name, disturb in _disturbances(outages, arguments):
            print(f"\r{name:<20}", end="", file=sys.stderr, flush=True)
            await outages.round(name, disturb)
    findings = await asyncio.to_thread(outages.end)
    took_s = sorted(outages.taken_over_s)
    report = {
        "programs": findings.programs,
        "told": findings.told,
        "sent again": findings.again,
        "starts of calls": dict(sorted(findings.starts.items())),
        "taken over in s": {"median": took_s[len(took_s) // 2], "longest": took_s[-1]} if took_s else None,
        "problems": findings.problems,
        "plain calls": plain.calls,
        "plain calls that failed": plain.problems,
    }
    print(f"\n{json.dumps(report, indent=1)}")
    is_late = bool(took_s) and took_s[-1] > TAKEN_OVER_WITHIN_S
    return bool(findings.problems or is_late)


def _disturbances(
    outages: Outages, arguments: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
    for number in range(arguments.kills):
        yield f"kill-{number}", outages.kill
    for number in range(arguments.restarts):
        yield f"restart-{number}", outages.restart_one_by_one
    if arguments.away:
        yield "away", partial(_away, arguments.away)


async def _away(seconds: float) -> None:
    postgres = shared_postgres()
    await asyncio.to_thread(postgres.stop)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(postgres.start)
