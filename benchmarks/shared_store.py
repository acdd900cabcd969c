"""What a PostgreSQL costs that gateways share: `python -m benchmarks shared_store [--seconds N]`.

Starts a server as Debian has it, with its files flushed. Values of 3 KB are committed one by one and a hundred at once;
they are acknowledged through the store's thread at two rates; names are claimed; and another gateway takes 10,000
sessions over. Times are of this machine, with the server on it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Final

import msgspec

from e2e.postgresql.server import ABSENT, PASSWORD, Postgres, binaries
from plait.gateway.guests.programs.core.record import Opened, ValueSet
from plait.gateway.guests.store.group_commit import GroupCommit
from plait.gateway.guests.store.postgres_keeper import PostgresKeeper
from plait.gateway.streams import SESSION, Change, StreamKey
from plait.lab.simulation.compare import percentile

VALUE: Final = "x" * 3_000
SESSIONS, VALUES = 10_000, 3
RATES: Final = (200, 2_000)
_ENCODER: Final = msgspec.msgpack.Encoder()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="at each rate (default: %(default)s)")
    arguments = parser.parse_args()
    if binaries() is None:
        print(ABSENT)
        return 2
    os.environ["PGPASSWORD"] = PASSWORD
    with Postgres(fsync=True) as postgres:
        one, two = (PostgresKeeper(postgres.url, f"http://{name}", release="", version=1) for name in ("one", "two"))
        one.open()
        print("| | wall, us | CPU of the gateway, us |\n| --- | --- | --- |")
        for name, work, each in _tasks(one):
            wall_s, cpu_s = _times(work)
            print(f"| {name} | {1e6 * wall_s / each:.0f} | {1e6 * cpu_s / each:.0f} |")
        one.close()
        for rate in RATES:
            asyncio.run(_acknowledged(postgres.url, rate, arguments.seconds))
        _take_over(one, two)
    return 0


def _tasks(keeper: PostgresKeeper) -> Iterator[tuple[str, Callable[[], object], int]]:
    """What is timed, and how many of what is named it does."""
    numbers = count()

    def named() -> StreamKey:
        return StreamKey(SESSION, "t", f"s{next(numbers)}")

    yield "a value, committed alone", lambda: keeper.write([_value(StreamKey(SESSION, "t", "one"))]), 1
    yield "a value of a hundred", lambda: keeper.write([_value(StreamKey(SESSION, "t", "one"))] * 100), 100
    yield "a name, claimed alone", lambda: keeper.claim([named()], instead="deleted"), 1
    yield "a name of twenty", lambda: keeper.claim([named() for _ in range(20)], instead="deleted"), 20
    yield "a lease, renewed", keeper.renew, 1
    draw = (10.0, 1e4), (1, 100), (10, 1e4)
    yield "a slice of a rate", lambda: keeper.draw("t", *draw, burst_s=10), 1


def _value(stream: StreamKey) -> Change:
    return Change(stream, time.time(), _ENCODER.encode(ValueSet("v", VALUE)))


def _times(work: Callable[[], object], times: int = 200) -> tuple[float, float]:
    """Mean wall and CPU seconds."""
    work()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(times):
        work()
    return (time.perf_counter() - wall_s) / times, (time.process_time() - cpu_s) / times


async def _acknowledged(url: str, rate: int, seconds: float) -> None:
    """Values at a rate, each waited for."""
    log = GroupCommit(PostgresKeeper(url, "http://rate", release="", version=1))
    log.start()
    await log.streams()
    took_s: list[float] = []

    async def tell(stream: StreamKey) -> None:
        begun_s = time.perf_counter()
        log.append([_value(stream)])
        assert await log.committed(stream)
        took_s.append(time.perf_counter() - begun_s)

    begun_s, tasks = time.perf_counter(), list[asyncio.Task[None]]()
    for number in range(round(rate * seconds)):
        tasks.append(asyncio.create_task(tell(StreamKey(SESSION, "t", f"r{number % 100}"))))
        await asyncio.sleep(max(0.0, begun_s + number / rate - time.perf_counter()))
    await asyncio.gather(*tasks)
    cpu_ms, commits = 1e3 * log.cpu_s / len(took_s), log.writer.commits
    await log.close()
    print(
        f"\n{rate} values/s: acknowledged in {1e3 * percentile(took_s, 0.5):.1f} ms (p50), "
        f"{1e3 * percentile(took_s, 0.99):.1f} ms (p99); {len(took_s) / commits:.1f} a commit; "
        f"{cpu_ms:.3f} ms of the thread's CPU a value"
    )


def _take_over(one: PostgresKeeper, two: PostgresKeeper) -> None:
    one.open()
    for begin in range(0, SESSIONS, 500):
        one.write([change for number in range(begin, begin + 500) for change in _session(number)])
    one.close()
    two.open()
    begun_s, found = time.perf_counter(), 0
    while streams := two.take_over():
        found += sum(stream.key.name.startswith("big") for stream in streams)
    print(
        f"\n{found} sessions with {VALUES} values each read by another gateway in {time.perf_counter() - begun_s:.2f} s"
    )
    two.close()


def _session(number: int) -> Sequence[Change]:
    stream = StreamKey(SESSION, "t", f"big{number}")
    return [Change(stream, time.time(), _ENCODER.encode(Opened(3600.0))), *[_value(stream)] * VALUES]
