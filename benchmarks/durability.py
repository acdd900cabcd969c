"""What the store costs: a hop with it and without it, its CPU time for each value, and how long a client waits for it.

`python -m benchmarks durability [--rounds N] [--folder PATH] [--synchronous KIND] [--json PATH]`. Rounds take turns
between a gateway without a store and one with it. A hop is the way from a call's answer to the call that takes its
value, at the engine. Then sessions get values of 3 KB at a steady pace, each of which a client
waits for; the CPU time is the whole process's, beyond that of the same values without a store.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import tempfile
import time
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.chaining.figures import Spread
from benchmarks.chaining.measurement import Hop, Measurement
from benchmarks.chaining.served import Served
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from plait.gateway.config.sections import StoreConfig
from plait.gateway.guests.durability.recorded import Recorded
from plait.gateway.guests.programs.core.record import UNRECORDED, Unrecorded, ValueSet
from plait.gateway.guests.store.group_commit import GroupCommit
from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
from plait.gateway.log.events import configure_logging
from plait.gateway.server.full_collections import FullCollections
from plait.gateway.streams import SESSION, StreamKey
from plait.lab.simulation.claim import Claim

HOP_RATIO = 1.1
CPU_MS = {2_000: 0.1, 200: 0.2}
"""By values a second: the most CPU time of the store for one."""
VALUE = "x" * 3_000
PACED_S = 3.0
PROGRAMS_A_ROUND = 4
WARM_UP_CALLS = 300
SWITCH_INTERVAL_S = 0.0005
"""As `plait serve` sets it."""


class BenchLog(GroupCommit):
    """A log as the records of sessions take it."""

    is_over = False


@dataclass(slots=True)
class Paced:
    """Values at a pace: CPU seconds of each with the store and without, and seconds until it was acknowledged."""

    with_store_s: list[float] = field(default_factory=list)
    without_s: list[float] = field(default_factory=list)
    acknowledged_s: list[float] = field(default_factory=list)

    @property
    def cpu_ms(self) -> float:
        """The store's for a value: the median over the rounds."""
        pairs = zip(self.with_store_s, self.without_s, strict=True)
        return 1e3 * median(with_store_s - without_s for with_store_s, without_s in pairs)


@dataclass(slots=True)
class Costs:
    """What was measured. Hops are seconds of the wall clock, by whether there was a store."""

    hops: dict[bool, list[Hop]] = field(default_factory=lambda: {False: [], True: []})
    paced: dict[int, Paced] = field(default_factory=lambda: {rate: Paced() for rate in CPU_MS})

    def wake(self, *, is_stored: bool) -> Spread:
        """A hop."""
        return Spread.of([hop.wake_s for hop in self.hops[is_stored]])

    def claims(self) -> list[Claim]:
        """What has to hold."""
        ratio = self.wake(is_stored=True).p50_s / self.wake(is_stored=False).p50_s
        claims = [Claim("median hop, with the store / without", ratio, most=HOP_RATIO)]
        for rate, most_ms in CPU_MS.items():
            found_ms = self.paced[rate].cpu_ms
            name = f"the store's CPU for a value at {rate:,}/s (ms)"
            claims.append(Claim(name, found_ms, most=most_ms))
        return claims


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim fails."""
    parser = timed_parser(__doc__, rounds=5)
    parser.add_argument("--folder", type=Path, help="a folder on the disk of the store (default: a temporary one)")
    parser.add_argument("--synchronous", choices=["normal", "full"], default="normal", help="default: %(default)s")
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        redirect_stderr(nowhere),
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
    ):
        configure_logging("info", "json")
        costs = uvloop.run(_measure(Path(folder), arguments.rounds, arguments.synchronous))
    times_us = {name: (1e6 * spread.p50_s, 1e6 * spread.p99_s) for name, spread in _spreads(costs).items()}
    report = Report(
        lines=[
            f"{name:<46} p50 {p50_us:7.0f} us   p99 {p99_us:7.0f} us" for name, (p50_us, p99_us) in times_us.items()
        ],
        claims=costs.claims(),
        results=[{"name": name, "p50_us": p50, "p99_us": p99} for name, (p50, p99) in times_us.items()],
        inputs={"python": platform.python_version()},
        is_timed=True,
    )
    return finish("durability", report, arguments)


def _spreads(costs: Costs) -> dict[str, Spread]:
    spreads = {
        f"a hop, {'with' if kind else 'without'} the store": costs.wake(is_stored=kind) for kind in (False, True)
    }
    for rate, paced in costs.paced.items():
        spreads[f"until a value is acknowledged, {rate:,}/s"] = Spread.of(paced.acknowledged_s)
    return spreads


async def _measure(folder: Path, rounds: int, synchronous: Any) -> Costs:
    costs = Costs()
    stored = Served(StoreConfig(path=str(folder / "hops" / "s.db"), synchronous=synchronous))
    await stored.recover()
    measured = {False: Measurement(Served(), time.perf_counter), True: Measurement(stored, time.perf_counter)}
    FullCollections(asyncio.get_running_loop()).start()
    for measurement in measured.values():
        await measurement.plain(
            WARM_UP_CALLS
        )  # the gateway learns how long answers are, and then sends several at once
        await measurement.program(None)
    for number in range(rounds):
        for turn in range(2 * PROGRAMS_A_ROUND):
            is_stored = bool((turn + number) % 2)
            costs.hops[is_stored] += await measured[is_stored].program(None)
    await stored.close()
    log = BenchLog(SqliteKeeper(folder / "values" / "s.db", synchronous))
    log.start()
    await log.streams()
    for number in range(rounds):
        for rate, paced in costs.paced.items():
            paced.without_s.append(await _paced(UNRECORDED, rate, []))
            session = StreamKey(SESSION, "tenant", f"{rate}-{number}")
            paced.with_store_s.append(await _paced(Recorded(log, session, 0.0), rate, paced.acknowledged_s))
    await log.close()
    return costs


async def _paced(record: Unrecorded, rate: int, acknowledged_s: list[float]) -> float:
    """CPU seconds for each of the values that a session gets at this rate."""
    loop, values = asyncio.get_running_loop(), round(rate * PACED_S)
    record.opened(3600.0, loop.time())
    began_s, cpu_s = loop.time(), time.process_time()

    async def one(number: int) -> None:
        set_s = time.perf_counter()  # uvloop's clock counts milliseconds
        record.write(ValueSet(f"v{number}", VALUE), loop.time())
        await record.settled()
        acknowledged_s.append(time.perf_counter() - set_s)

    tasks = set[asyncio.Task[None]]()
    for number in range(values):
        await asyncio.sleep(max(0.0, began_s + number / rate - loop.time()))
        task = asyncio.create_task(one(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return (time.process_time() - cpu_s) / values


if __name__ == "__main__":
    sys.exit(main())
