"""The cost of watching a gateway: CPU time and memory, at 60 calls/s over 64 embedded engines.

`python -m benchmarks live_screen [--rounds N] [--seconds S] [--engines N] [--json PATH]`. In each round nobody watches
for half of the time, then a terminal screen (`plait top`) and what a page reads, then nobody again. Its metrics are
scraped each 5 s all the time. The servers are real, and the load comes from a process of its own. Showing costs what
the gateway needs more, and the screen's process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Final

import httpx

from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from e2e.ports import free_ports
from e2e.terminal import terminal
from plait.gateway.commands.asked_gateway import AskedGateway
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.endless_load import send_endlessly
from plait.lab.simulation.processes import FleetPlan, running_fleet

CALLS_PER_S: Final = 60.0
KV_TOKENS: Final = 80_000
"""Of each engine. Their caches are full after the warm-up, so that the gateway's account of them grows no more."""

WARM_UP_S: Final = 60.0
SETTLE_S: Final = 5.0
"""After a change of watchers, before anything is measured."""

SCRAPE_S: Final = 5.0
EVENTS_PER_STATUS: Final = 4
"""A page asks for the status each 2 s."""

MOST_CPU: Final = 0.10
MOST_GROWTH: Final = 1.05
KEY: Final = "a-key-for-the-benchmark"
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass
class Stretch:
    """Some time of a process: the part of a core that it used, and its memory at the begin and at the end."""

    seconds: float
    cpu: float
    first_mib: float
    last_mib: float

    @property
    def growth_mib(self) -> float:
        """Its growth in a minute."""
        return (self.last_mib - self.first_mib) * 60.0 / self.seconds


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim does not hold."""
    parser = timed_parser(__doc__, rounds=2)
    parser.add_argument("--engines", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="watched in each round (default: %(default)s)")
    arguments = parser.parse_args()
    port, engines = free_ports(1 + arguments.engines)[0], arguments.engines
    plan = FleetPlan(port=port, engine_port=port + 1, engines=engines, kv_tokens=KV_TOKENS, admin_key=KEY)
    with running_fleet(plan) as gateway_id, _load(plan), _scraped(plan):
        time.sleep(WARM_UP_S)
        rounds = [_round(plan, gateway_id, arguments.seconds) for _ in range(arguments.rounds)]
    return finish("live_screen", _report(rounds), arguments)


def _round(plan: FleetPlan, gateway_id: int, seconds: float) -> dict[str, Stretch]:
    before = _measured([gateway_id], seconds / 2)[0]
    with terminal("top", plan.url, f"--key={KEY}") as shown, _stream(plan) as rates:
        time.sleep(SETTLE_S)
        watched, screen = _measured([gateway_id, shown.process.pid], seconds)
        assert "Shared prefixes" in shown.text
        assert shown.process.poll() is None
    time.sleep(SETTLE_S)
    after = _measured([gateway_id], seconds / 2)[0]
    rate = mean(rates[len(rates) // 2 :])
    print(
        f"gateway {before.cpu:.1%} of a core, watched {watched.cpu:.1%}, again alone {after.cpu:.1%}; "
        f"screen {screen.cpu:.1%}, {screen.first_mib:.1f} to {screen.last_mib:.1f} MiB; "
        f"gateway {before.first_mib:.1f} MiB, {before.growth_mib:+.1f} a minute, "
        f"watched {watched.growth_mib:+.1f}, again alone {after.growth_mib:+.1f}; {rate:.1f} calls/s",
        flush=True,
    )
    return {"before": before, "watched": watched, "after": after, "screen": screen}


def _measured(process_ids: list[int], seconds: float) -> list[Stretch]:
    """The processes during some time."""
    began_s, began = time.monotonic(), [(_cpu_s(pid), _mib(pid)) for pid in process_ids]
    time.sleep(seconds)
    passed_s = time.monotonic() - began_s
    return [
        Stretch(passed_s, (_cpu_s(pid) - cpu_s) / passed_s, mib, _mib(pid))
        for pid, (cpu_s, mib) in zip(process_ids, began, strict=True)
    ]


def _cpu_s(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _mib(process_id: int) -> float:
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@contextmanager
def _load(plan: FleetPlan) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=_send, args=(plan.url, plan.model), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _send(url: str, model: str) -> None:
    asyncio.run(send_endlessly(url, model, CALLS_PER_S, swing=0.0))


@contextmanager
def _stream(plan: FleetPlan) -> Iterator[list[float]]:
    """A second watcher, as a page is one. Gives the rates of calls that it reads."""
    is_over, rates = threading.Event(), list[float]()

    def read() -> None:
        asked = AskedGateway(plan.url, KEY)
        for name, data in asked.events(is_over):
            if is_over.is_set():
                return
            if name == "fleet":
                rates.append(data["calls_per_s"])
                if len(rates) % EVENTS_PER_STATUS == 0:
                    asked.ask("/admin/status")

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield rates
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _scraped(plan: FleetPlan) -> Iterator[None]:
    """The metrics are read, as Prometheus does."""
    is_over = threading.Event()

    def read() -> None:
        while not is_over.wait(SCRAPE_S):
            httpx.get(f"{plan.url}/metrics", trust_env=False, timeout=SCRAPE_S).raise_for_status()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _report(rounds: Sequence[Mapping[str, Stretch]]) -> Report:
    """No claim is of the gateway's memory: its caches fill while it serves, watched or not, and by more than watching
    may add. What is kept for watchers is bounded by counts, which tests/gateway/guests/live checks.
    """
    alone = mean((one["before"].cpu + one["after"].cpu) / 2 for one in rounds)
    watched, screen = mean(one["watched"].cpu for one in rounds), mean(one["screen"].cpu for one in rounds)
    growth = max(one["screen"].last_mib / one["screen"].first_mib for one in rounds)
    added_mib = mean(
        one["watched"].growth_mib - (one["before"].growth_mib + one["after"].growth_mib) / 2 for one in rounds
    )
    return Report(
        lines=[
            f"gateway alone {alone:.1%}, watched {watched:.1%}, screen {screen:.1%} of a core",
            f"the gateway's memory grows by {added_mib:+.1f} MiB a minute more while it is watched",
        ],
        claims=[
            Claim("CPU of showing, of a core", watched - alone + screen, most=MOST_CPU),
            Claim("memory of the screen, end / begin", growth, most=MOST_GROWTH),
        ],
        results=[{name: asdict(stretch) for name, stretch in one.items()} for one in rounds],
        inputs={"calls_per_s": CALLS_PER_S, "python": platform.python_version()},
        is_timed=True,
    )


if __name__ == "__main__":
    sys.exit(main())
