"""What others notice of a tenant that sends more than the gateway can take: `python -m benchmarks gateway_limit`.

`[--loads L ...] [--tenants N ...] [--clients N] [--runs N] [--seconds S] [--characters N] [--json PATH]`. The gateway
has one core and its default settings. Engines that answer at once from memory (nginx) and clients (h2load) are written
in C and have another core, so the gateway's event loop is what is full. Its limit is measured first: what a few clients
get that ask again at once. Then one tenant's clients ask so many times more, each of them again at once if it is late.
A probe asks for `/health`, and where there are two tenants, the other makes single calls, each over a new connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.chaining.figures import Spread
from benchmarks.faulting.gateways import plait, process
from benchmarks.limiting.clients import KEY, ask, body, engine_command, pinned_to
from benchmarks.plain.answering_engine import MODEL
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.ports import free_ports
from plait.lab.simulation.claim import Claim

ENGINES: Final = 2
LIGHT: Final = "light"
SERVER: Final = f"api_keys = {json.dumps([KEY, LIGHT])}"
MODELS: Final = f'[[models]]\nname = "{MODEL}"\ntokenizer = "embedded"'
EVERY_S: Final = 0.1
"""Between single calls, and between probes."""
FEW: Final = 32
"""Clients that measure the limit."""
CAPACITY_S: Final = 6.0
LAG: Final = re.compile(r'^plait_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)
SUSPECTED: Final = re.compile(
    r"^plait_engine_health_changes_total\{(?=[^}]*suspect|[^}]*ejected)[^}]*\} (\S+)$", re.MULTILINE
)
MOST_S: Final = {"lag p99": 0.05, "single calls p99": 0.25, "/health p99": 0.1}
LEAST_GOOD: Final = 0.7
"""Of the limit, or of what is asked if that is less."""


@dataclass(frozen=True, slots=True)
class Run:
    """One gateway under one load. `lag_p99_s` is the bound of the histogram's bucket; `good` is a part of the limit."""

    load: float
    tenants: int
    capacity: float
    good: float
    refused: int
    lag_p99_s: float
    single: Spread | None
    health: Spread
    failed: int
    suspected: int

    @property
    def times_s(self) -> dict[str, float]:
        """What is bounded."""
        single_s = 0.0 if self.single is None else self.single.p99_s
        return dict(zip(MOST_S, (self.lag_p99_s, single_s, self.health.p99_s), strict=True))

    @property
    def least_good(self) -> float:
        """What part of the limit is to be answered. Clients that wait for answers ask a little less than that."""
        return min(LEAST_GOOD, 0.95 * self.load)


def main() -> int:
    """Run, print, and say whether the bounds hold."""
    parser = timed_parser(__doc__)
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.5, 1.0, 1.5, 3.0], help="times the limit (default: %(default)s)"
    )
    parser.add_argument("--clients", type=int, default=1_000, help="connections of the tenant (default: %(default)s)")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 2], help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="of each load (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each (default: %(default)s)")
    parser.add_argument("--characters", type=int, default=432, help="of each prompt (default: %(default)s)")
    arguments = parser.parse_args()
    runs = list(_runs(arguments))
    report = Report(lines=[], claims=list(_claims(runs)), results=[asdict(run) for run in runs], is_timed=True)
    return finish("gateway_limit", report, arguments)


def _runs(arguments: argparse.Namespace) -> Iterator[Run]:
    print("tenants  load  limit/s  good  refused  lag p99   single p50/p99  /health p50/p99   failed  suspected")
    for _ in range(arguments.runs):
        for tenants in arguments.tenants:
            for load in arguments.loads:
                run = asyncio.run(_run(load, tenants, arguments))
                single, health = (
                    "            -" if spread is None else f"{spread.p50_s * 1e3:6.0f} {spread.p99_s * 1e3:6.0f}"
                    for spread in (run.single, run.health)
                )
                print(
                    f"{tenants:7} {load:5.1f} {run.capacity:8.0f} {run.good:5.2f} {run.refused:8} "
                    f"{run.lag_p99_s * 1e3:8.0f}    {single} ms {health} ms {run.failed:8} {run.suspected:10}",
                    flush=True,
                )
                yield run


def _claims(runs: Sequence[Run]) -> Iterator[Claim]:
    """The bounds of the medians; no probe fails, and no load below the limit is refused."""
    for tenants, load in sorted({(run.tenants, run.load) for run in runs}):
        those = [run for run in runs if (run.tenants, run.load) == (tenants, load)]
        where = f"of {tenants} tenants at {load:g} x"
        for name, most_s in MOST_S.items():
            middle_s = median(run.times_s[name] for run in those)
            yield Claim(f"{name} {where} (ms)", middle_s * 1e3, most=most_s * 1e3)
        good = median(run.good for run in those)
        yield Claim(f"good answers {where}, of the limit", good, least=those[0].least_good)
        for name in ("failed", "suspected", *(("refused",) if load < 1 else ())):
            yield Claim(f"{name} {where}", max(getattr(run, name) for run in those), most=0)


async def _run(load: float, tenants: int, arguments: argparse.Namespace) -> Run:
    seconds, characters = arguments.seconds, arguments.characters
    ports = free_ports(2 + ENGINES)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-limit-")))
        for port in ports[2:]:
            engine = pinned_to(1, engine_command(port, folder / f"engine{port}"))
            stack.enter_context(process(engine, folder / f"engine{port}.log"))
        command = plait(ports, [f"http://127.0.0.1:{port}" for port in ports[2:]], folder, MODELS, SERVER)
        stack.enter_context(process(pinned_to(0, command), folder / "gateway.log"))
        port = ports[0]
        await _until_ready(port)
        closed = await ask(port, folder, clients=FEW, per_s=None, seconds=CAPACITY_S, characters=characters)
        capacity = closed.good_per_s
        before = await _lag_counts(port)
        flood, singles, probes = await asyncio.gather(
            ask(port, folder, clients=arguments.clients, per_s=load * capacity, seconds=seconds, characters=characters),
            _repeated(seconds, lambda: _single(port)) if tenants > 1 else _repeated(0.0, lambda: _single(port)),
            _repeated(seconds, lambda: _get(port, "/health")),
        )
        lag_p99_s = _p99(before, await _lag_counts(port))
        changes = (await _get(port, "/metrics")).body.decode()
    return Run(
        load=load,
        tenants=tenants,
        capacity=capacity,
        good=flood.good_per_s / capacity,
        refused=flood.refused,
        lag_p99_s=lag_p99_s,
        single=Spread.of([answer.time_s for answer in singles]) if singles else None,
        health=Spread.of([answer.time_s for answer in probes]),
        failed=sum(answer.status != 200 for answer in (*singles, *probes)),
        suspected=round(sum(map(float, SUSPECTED.findall(changes)))),
    )


async def _repeated(seconds: float, ask: Callable[[], Awaitable[Answer]]) -> list[Answer]:
    """Ask at a steady rate, whether or not there are answers."""
    began_s, asked = time.monotonic(), list[asyncio.Future[Answer]]()
    while time.monotonic() - began_s < seconds:
        asked.append(asyncio.ensure_future(ask()))
        await asyncio.sleep(EVERY_S)
    return await asyncio.gather(*asked)


async def _single(port: int) -> Answer:
    async with Client(port) as client:
        return await client.post(CHAT, body(str(time.monotonic_ns()), 432), {"authorization": f"Bearer {LIGHT}"})


async def _get(port: int, path: str) -> Answer:
    async with Client(port) as client:
        return await client.get(path)


async def _until_ready(port: int) -> None:
    for _ in range(300):
        if (await _get(port, "/ready")).status == 200:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError


async def _lag_counts(port: int) -> dict[float, float]:
    """The cumulative counts of the lag's histogram, by bound."""
    answer = await _get(port, "/metrics")
    assert answer.status == 200, answer
    text = answer.body.decode()
    return {float(bound): float(count) for bound, count in LAG.findall(text)}


def _p99(before: dict[float, float], after: dict[float, float]) -> float:
    """The bound that 99 of 100 lags between two times kept."""
    counts = {bound: count - before[bound] for bound, count in after.items()}
    return min(bound for bound, count in counts.items() if count >= 0.99 * max(counts.values()))


if __name__ == "__main__":
    sys.exit(main())
