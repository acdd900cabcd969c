"""What others notice of a tenant that sends more than the gateway can take: `python -m benchmarks gateway_limit`.

`[--loads L ...] [--runs N] [--seconds S] [--characters N] [--json PATH]`. Engines answer at once from memory, so the
gateway's event loop is what is full. Its limit is measured first: what clients that wait for their answers get. Then
one tenant sends so many times more in open loop, while another makes single calls and a probe asks for `/health`, each
over a new connection. The gateway has its default settings.
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
from typing import Any, Final

from benchmarks.chaining.figures import Spread
from benchmarks.faulting.gateways import plait, process
from benchmarks.limiting.flood import KEY, body
from benchmarks.plain.answering_engine import MODEL
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.ports import free_ports

ENGINES: Final = 2
LIGHT: Final = "light"
SERVER: Final = f"api_keys = {json.dumps([KEY, LIGHT])}"
MODELS: Final = f'[[models]]\nname = "{MODEL}"\ntokenizer = "embedded"'
EVERY_S: Final = 0.1
"""Between single calls, and between probes."""
CAPACITY_S: Final = 6.0
LAG: Final = re.compile(r'^plait_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)
SUSPECTED: Final = re.compile(
    r"^plait_engine_health_changes_total\{(?=[^}]*suspect|[^}]*ejected)[^}]*\} (\S+)$", re.MULTILINE
)
LIMITS_S: Final = {"lag p99": 0.05, "single calls p99": 0.25, "/health p99": 0.1}


@dataclass(frozen=True, slots=True)
class Run:
    """One gateway under one load. `lag_p99_s` is the bound of the histogram's bucket."""

    load: float
    capacity: float
    answered: dict[str, int]
    unshaped: int
    lag_p99_s: float
    single: Spread
    health: Spread
    failed: int
    suspected: int
    shown: str

    @property
    def figures(self) -> dict[str, float]:
        """What is bounded."""
        return dict(zip(LIMITS_S, (self.lag_p99_s, self.single.p99_s, self.health.p99_s), strict=True))


def main() -> int:
    """Run, print, and say whether the bounds hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gateway_limit")
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 3.0], help="times the limit")
    parser.add_argument("--runs", type=int, default=5, help="of each load (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each (default: %(default)s)")
    parser.add_argument("--characters", type=int, default=432, help="of each prompt (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report there")
    arguments = parser.parse_args()
    runs = list(_runs(arguments))
    broken = list(_broken(runs))
    print("\n".join(broken) or "all bounds hold")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8")
    return int(bool(broken))


def _runs(arguments: argparse.Namespace) -> Iterator[Run]:
    print("load   limit/s   lag p99   single p50/p99   /health p50/p99   failed   suspected   the flood's answers")
    for _ in range(arguments.runs):
        for load in arguments.loads:
            run = asyncio.run(_run(load, arguments.seconds, arguments.characters))
            times = "   ".join(
                f"{spread.p50_s * 1e3:5.0f} {spread.p99_s * 1e3:6.0f}" for spread in (run.single, run.health)
            )
            print(
                f"{load:4.1f} {run.capacity:9.0f} {run.lag_p99_s * 1e3:8.0f}    {times} ms {run.failed:8} "
                f"{run.suspected:9}      {run.answered}, unshaped: {run.unshaped} {run.shown}",
                flush=True,
            )
            yield run


def _broken(runs: Sequence[Run]) -> Iterator[str]:
    """The bounds that do not hold, of the medians."""
    for load in sorted({run.load for run in runs}):
        those = [run for run in runs if run.load == load]
        for name, most_s in LIMITS_S.items():
            middle_s = median(run.figures[name] for run in those)
            if middle_s > most_s:
                yield f"FAILS: {name} at {load:g} x = {middle_s * 1e3:.0f} ms, wanted {most_s * 1e3:.0f}"
        for name in ("failed", "suspected", "unshaped"):
            if any(getattr(run, name) for run in those):
                yield f"FAILS: {name} at {load:g} x: {[getattr(run, name) for run in those]}"


async def _run(load: float, seconds: float, characters: int) -> Run:
    ports = free_ports(2 + ENGINES)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-limit-")))
        for port in ports[2:]:
            engine = [sys.executable, "-m", "benchmarks.plain.answering_engine", str(port)]
            stack.enter_context(process(engine, folder / f"engine{port}.log"))
        command = plait(ports, [f"http://127.0.0.1:{port}" for port in ports[2:]], folder, MODELS, SERVER)
        stack.enter_context(process(command, folder / "gateway.log"))
        await _until_ready(ports[0])
        closed = await _flooded(ports[0], 0.0, CAPACITY_S, characters)
        capacity = closed["statuses"]["200"] / closed["seconds"]
        await asyncio.sleep(1.0)
        before = await _lag_counts(ports[0])
        flood = asyncio.create_task(_flooded(ports[0], load * capacity, seconds, characters))
        singles, probes = await asyncio.gather(
            _repeated(seconds, lambda: _single(ports[0])), _repeated(seconds, lambda: _get(ports[0], "/health"))
        )
        came = await flood
        lag_p99_s = _p99(before, await _lag_counts(ports[0]))
        changes = (await _get(ports[0], "/metrics")).body.decode()
    return Run(
        load=load,
        capacity=capacity,
        answered=came["statuses"],
        unshaped=came["unshaped"],
        lag_p99_s=lag_p99_s,
        single=Spread.of([answer.time_s for answer in singles]),
        health=Spread.of([answer.time_s for answer in probes]),
        failed=sum(answer.status != 200 for answer in (*singles, *probes)),
        suspected=round(sum(map(float, SUSPECTED.findall(changes)))),
        shown=came["shown"],
    )


async def _flooded(port: int, rate: float, seconds: float, characters: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.limiting.flood", str(port), str(rate), str(seconds), str(characters)]
    flood = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    came: dict[str, Any] = json.loads((await flood.communicate())[0])
    return came


async def _repeated(seconds: float, ask: Callable[[], Awaitable[Answer]]) -> list[Answer]:
    """Ask at a steady rate, whether or not there are answers."""
    began_s, asked = time.monotonic(), list[asyncio.Future[Answer]]()
    while time.monotonic() - began_s < seconds:
        asked.append(asyncio.ensure_future(ask()))
        await asyncio.sleep(EVERY_S)
    return await asyncio.gather(*asked)


async def _single(port: int) -> Answer:
    async with Client(port) as client:
        return await client.post(CHAT, body(time.monotonic_ns(), 432), {"authorization": f"Bearer {LIGHT}"})


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
