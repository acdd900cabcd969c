"""Engines that are killed, stopped and misbehave, and clients that do: `python -m benchmarks soak --minutes 60`.

Every plain call is answered or fails cleanly. Every request of a bad client ends as documented. One more engine, with a
model of its own, is left alone: each of its calls is answered, and it is never suspected. At the end the books
are at zero, and the gateway holds no more descriptors, threads and tasks than after its warm-up. Its memory is flat:
that is judged only of runs of 20 minutes and longer, which fill its caches.

What an engine refuses as the caller's fault is passed on, also to the calls of a program behind it. An engine that
refuses is quick and gets many calls. So the share of failures leaves refusals out.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.faulting.bad_clients import MODELS, SETTINGS, BadClients
from benchmarks.faulting.footprint import Footprint, footprint
from benchmarks.faulting.gateways import plait, process
from benchmarks.faulting.measurement import engines_command, until_ready
from benchmarks.faulting.mixed_calls import MixedCalls
from benchmarks.faulting.trouble import Trouble, TroubledEngine
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from e2e.faults.fleet import ScriptedEngine
from e2e.faults.raw_client import CHAT, Client
from e2e.faults.verdicts import is_good
from e2e.ports import free_ports
from plait.lab.simulation.claim import Claim

ENGINES: Final = 4
STEADY: Final = "steady"
"""The engine that is left alone, and its model."""
STEADY_EVERY_S: Final = 0.2
WORKERS: Final = 24
CALL_TIMEOUT_S: Final = 60.0
PROFILE: Final = """
[source]
engine = "scripted"
model = "any"
accelerator = "none"
provenance = "benchmarks/faulting/measurement.py: 100 ms, and 12.5 ms a token; a prompt's length costs nothing"
[forward]
knots = [[1, 12.5]]
slope_ms = 0.0001
[attention]
context_ms = 0.0
[kv]
tokens = 1_000_000
"""
"""The engines' cost. With a real one's, a prompt of a megabyte would excuse an engine that hangs for minutes.

The estimated caches hold three such prompts each, so they are full after some minutes.
"""
SAMPLE_S: Final = 5.0
WARM_SHARE, WARM_MOST_S = 0.1, 300.0
QUIET_S: Final = 8.0
"""The pause in which the gateway closes what it needs no more: its idle connections to clients live for 5 s."""
SLACK: Final = 12
"""Descriptors and tasks that may be more or fewer: pools of idle connections to engines are not always full."""
CHANGES: Final = "plait_engine_health_changes_total"
RSS_FROM_S: Final = 1200.0
RSS_GROWTH: Final = 1.15
_NOT_RETRIED: Final = re.compile(r'^plait_retries_refused_total{.*why="(\w+)".*} ([0-9.e+]+)$', re.MULTILINE)
"""Why failed calls were not tried again, and how many."""


@dataclass
class Soak:
    """What was seen. `warm` and `end` are the quiet footprints after the warm-up and at the end."""

    minutes: float
    seed: int
    fates: dict[str, int] = field(default_factory=dict)
    troubles: dict[str, int] = field(default_factory=dict)
    unclean: list[str] = field(default_factory=list)
    bad_clients: dict[str, int] = field(default_factory=dict)
    undocumented: list[str] = field(default_factory=list)
    steady: dict[str, int] = field(default_factory=lambda: {"good": 0, "failed": 0, "changes": -1})
    excess_gone: float = 0.0
    defects: float = 0.0
    worst_s: float = 0.0
    not_retried: dict[str, float] = field(default_factory=dict)
    outstanding: float = -1.0
    held: float = -1.0
    held_bytes: float = -1.0
    restarts: float = -1.0
    warm: Footprint | None = None
    end: Footprint | None = None
    samples: list[Footprint] = field(default_factory=list)

    def claims(self) -> Iterator[Claim]:
        """Fixed targets."""
        assert self.warm is not None
        assert self.end is not None
        judged = sum(self.fates.values()) - self.fates.get("refused", 0)
        yield Claim("calls that did not end cleanly", self.fates.get("unclean", 0), most=0)
        yield Claim("requests of bad clients that did not end as documented", len(self.undocumented), most=0)
        yield Claim("calls that failed on the engine that is left alone", self.steady["failed"], most=0)
        yield Claim("changes of that engine's health", self.steady["changes"], most=0)
        yield Claim("calls whose client is gone, less clients that left", self.excess_gone, most=0)
        yield Claim("calls that a defect has ended", self.defects, most=0)
        yield Claim(
            "share of calls that failed, of those not refused", 1 - self.fates.get("good", 0) / judged, most=0.05
        )
        yield Claim("calls left on the books", self.outstanding, most=0)
        yield Claim("held calls left", self.held, most=0)
        yield Claim("held and recorded bytes left", self.held_bytes, most=0)
        yield Claim("tasks that failed and were restarted", self.restarts, most=0)
        yield Claim("longest call (s)", self.worst_s, most=CALL_TIMEOUT_S)
        yield Claim("descriptors", self.end.descriptors, most=self.warm.descriptors + SLACK)
        yield Claim("threads", self.end.threads, most=self.warm.threads)
        if self.end.tasks is not None and self.warm.tasks is not None:
            yield Claim("tasks", self.end.tasks, most=self.warm.tasks + SLACK)
        if 60 * self.minutes >= RSS_FROM_S:
            growth = median(_rss(self.samples, 4)) / median(_rss(self.samples, 1))
            yield Claim("memory, last fifth / second fifth", growth, most=RSS_GROWTH)


def main() -> int:
    """Soak, print, write what was asked for; returns 1 if a claim fails."""
    parser = timed_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=19, help="of the troubles and the calls (default: %(default)s)")
    parser.add_argument(
        "--logs", type=Path, metavar="FOLDER", help="keep the logs of the gateway and the engines there"
    )
    arguments = parser.parse_args()
    soak = Soak(arguments.minutes, arguments.seed)
    with ExitStack() as stack:
        folder = arguments.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        asyncio.run(_run(soak, folder))
    lines = [
        f"calls {soak.fates}\nnot retried {soak.not_retried}\ntroubles {soak.troubles}",
        f"left alone {soak.steady}\nbad clients {soak.bad_clients}",
        f"warm {soak.warm}\nend  {soak.end}",
        *(f"unclean: {line}" for line in soak.unclean[:5]),
        *(f"not as documented: {line}" for line in soak.undocumented[:5]),
    ]
    report = Report(lines=lines, claims=list(soak.claims()), results=[asdict(soak)], is_timed=True)
    return finish("soak", report, arguments)


async def _run(soak: Soak, folder: Path) -> None:
    ports = free_ports(2 * ENGINES + 4)
    fleet = [ScriptedEngine(f"e{n}", MODELS, ports[2 * n], ports[2 * n + 1]) for n in range(ENGINES)]
    steady = ScriptedEngine(STEADY, [STEADY], ports[-4], ports[-3])
    with ExitStack() as stack:
        engines = [TroubledEngine(one, engines_command([one]), folder / f"{one.name}.log") for one in fleet]
        for engine in engines:
            engine.start()
            stack.callback(engine.end)
        (folder / "scripted.toml").write_text(PROFILE)
        stack.enter_context(process(engines_command([steady]), folder / "steady.log"))
        models = [
            f'[[models]]\nname = "{name}"\ntokenizer = "embedded"\nprofile = "scripted.toml"'
            for name in (MODELS[0], STEADY)
        ]
        urls = [engine.url for engine in (*fleet, steady)]
        command = plait(ports[-2:], urls, folder, "\n".join([*models, SETTINGS]))
        gateway = stack.enter_context(process(command, folder / "gateway.log"))
        await until_ready(ports[-2], folder / "gateway.log", ENGINES + 1)
        await _soak(soak, engines, gateway, ports[-2])


async def _soak(soak: Soak, engines: Sequence[TroubledEngine], gateway: subprocess.Popen[bytes], port: int) -> None:
    dice, began_s, length_s = random.Random(soak.seed), time.monotonic(), 60 * soak.minutes
    calls, trouble = MixedCalls(port, WORKERS, dice, CALL_TIMEOUT_S), Trouble(engines, dice)
    bad = BadClients(port, dice)

    async def look() -> tuple[Footprint, str]:
        async with Client(port) as client:
            metrics = (await client.get("/metrics")).body.decode()
        return footprint(gateway.pid, time.monotonic() - began_s, metrics), metrics

    warm_s = min(WARM_MOST_S, WARM_SHARE * length_s)
    metrics = (await look())[1]
    changes = _sum(metrics, CHANGES, f'engine="e{ENGINES}"')
    for phase_s in (warm_s, length_s - warm_s):
        ends_s = time.monotonic() + phase_s
        troubling = asyncio.create_task(trouble.run())
        steady = asyncio.create_task(_steady(soak, port, phase_s))
        calls.start()
        bad.start()
        while time.monotonic() < ends_s:
            soak.samples.append((await look())[0])
            await asyncio.sleep(min(SAMPLE_S, max(0.0, ends_s - time.monotonic())))
        troubling.cancel()
        with suppress(asyncio.CancelledError):
            await troubling
        await steady
        await calls.stop()
        await bad.stop()
        await asyncio.sleep(QUIET_S)
        quiet, metrics = await look()
        soak.warm, soak.end = soak.warm or quiet, quiet
    soak.fates, soak.troubles, soak.unclean = dict(calls.fates), dict(trouble.counts), calls.unclean
    soak.bad_clients, soak.undocumented = dict(sorted(bad.fates.items())), bad.undocumented
    soak.steady["changes"] = round(_sum(metrics, CHANGES, f'engine="e{ENGINES}"') - changes)
    soak.excess_gone = max(0.0, _sum(metrics, "plait_calls_total", 'outcome="client_gone"') - bad.gone)
    soak.defects = _sum(metrics, "plait_calls_total", 'outcome="defect"')
    soak.worst_s = calls.worst_s
    soak.not_retried = {why: float(value) for why, value in _NOT_RETRIED.findall(metrics)}
    soak.outstanding, soak.held = _sum(metrics, "plait_engine_outstanding_calls"), _sum(metrics, "plait_held_calls")
    soak.restarts = _sum(metrics, "plait_task_restarts_total") if "plait_task_restarts_total{" in metrics else 0.0
    soak.held_bytes = _sum(metrics, "plait_held_bytes") + _sum(metrics, "plait_recorded_answer_bytes")


async def _steady(soak: Soak, port: int, time_s: float) -> None:
    """Call the engine that is left alone."""
    began_s = time.monotonic()
    body = {"model": STEADY, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    async with Client(port, CALL_TIMEOUT_S) as client:
        while time.monotonic() - began_s < time_s:
            answer = await client.post(CHAT, body)
            soak.steady["good" if is_good(body, answer) else "failed"] += 1
            await asyncio.sleep(STEADY_EVERY_S)


def _sum(metrics: str, name: str, label: str = "") -> float:
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)


def _rss(samples: Sequence[Footprint], fifth: int) -> list[int]:
    size = len(samples) // 5
    return [sample.rss_bytes for sample in samples[fifth * size : (fifth + 1) * size]]


if __name__ == "__main__":
    sys.exit(main())
