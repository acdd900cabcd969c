"""Short calls with a TTFT objective behind long prompts, on two real servers: the engine's scheduler against `slo`.

`python -m benchmarks engine_slo [--engine vllm|sglang] [--emulate PROFILE] [--runs N] [--json PATH]`. Both servers are
up, one has load at a time, and runs take turns (stock, slo, slo, stock, ...); both are sent the same calls. A short
call's objective is three times its TTFT on that server unloaded, measured just before each run. Beside that stands what
an emulated engine keeps of the same calls, whose iterations take as long as the real ones were measured to take.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine_slo_parts.emulated import attainments, measured_costs
from benchmarks.engine_slo_parts.figures import OBJECTIVE, Run, claims, figures, medians
from benchmarks.engine_slo_parts.load import Load
from benchmarks.engine_slo_parts.servers import ENGINES, OURS, STOCK, Engine, arguments_of, new_servers
from benchmarks.engine_slo_parts.workload import CallSource, Shape
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from e2e.real_engines.engine import RealEngine

PERIOD = 1.6
"""Unloaded TTFTs of a long prompt between two of them: the engine then always has one or two and can just keep up."""

UNLOADED_CALLS = 21
"""One after the other, before each run."""

COLUMNS = {
    "attainment": ("met", 1, 2),
    "objective_s": ("objective ms", 1e3, 0),
    "unloaded_ttft_s": ("unloaded ms", 1e3, 0),
    "ttft_p50_s": ("p50 ms", 1e3, 0),
    "ttft_p90_s": ("p90 ms", 1e3, 0),
    "ttft_max_s": ("max ms", 1e3, 0),
    "output_tokens_s": ("tokens/s", 1, 1),
    "long_ttft_s": ("long TTFT s", 1, 2),
    "long_e2e_s": ("long E2E s", 1, 2),
    "load_average": ("load", 1, 1),
}
"""By figure: its heading, what it is multiplied with, and its digits."""


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim fails."""
    parser = timed_parser(__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="(default: %(default)s)")
    parser.add_argument(
        "--emulate", metavar="PROFILE", help="have SGLang's forward passes take as long as this cost profile says"
    )
    parser.add_argument("--runs", type=int, default=5, help="of each system (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.emulate and arguments.engine != "sglang":
        parser.error("only SGLang's forward passes can be emulated")
    engine = ENGINES[arguments.engine]
    if not engine.is_installed:
        print(f"skipped: `python -m e2e.{arguments.engine}.environment` builds the engine's environment")
        return 0
    inputs, runs, by_engine = _with_servers(engine, arguments.emulate, arguments.runs)
    shown = "none" if by_engine is None else f"{by_engine:.2f}"
    emulated = ", ".join(f"{system} {share:.2f}" for system, share in inputs["emulated"].items())
    report = Report(
        lines=[
            _table(runs),
            "",
            f"by the engine's own clock, without HTTP, {OURS} met {shown} of its last calls",
            f"of the same calls, an emulated engine met: {emulated}",
        ],
        claims=list(claims(runs)),
        results=[asdict(run) for run in runs],
        inputs={
            **inputs,
            "medians": {system: medians(runs, system) for system in (STOCK, OURS)},
            "attainment_by_engine": by_engine,
        },
        is_timed=True,
    )
    return finish("engine_slo", report, arguments)


def _with_servers(engine: Engine, emulated: str | None, n_runs: int) -> tuple[dict[str, Any], list[Run], float | None]:
    """Start both servers, measure, stop them; returns inputs, runs and what ours reports of its SLO attainment."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = new_servers(engine, Path(folder), emulated)
        _say(f"starting two servers of {engine.title} (a minute)")
        for server in servers.values():
            server.start()
            stack.callback(server.stop)
        for server in servers.values():
            server.wait_until_ready()
        shape, runs = asyncio.run(_measure(servers, engine.shape, n_runs))
        by_engine = servers[OURS].cache_state().scheduler.slo_attainment
        costs = asyncio.run(measured_costs(servers[OURS].url))
        kept = attainments([CallSource(shape, f"run {number}").run() for number in range(n_runs)], costs, engine.ahead)
        return _inputs(engine, emulated, shape, servers) | {"emulated": kept}, runs, by_engine


async def _measure(servers: dict[str, RealEngine], shape: Shape, n_runs: int) -> tuple[Shape, list[Run]]:
    """Warm both servers up, and run in turns."""
    loads = {system: Load(server.url, server.annotations_field) for system, server in servers.items()}
    period_s = PERIOD * await _warm_up(loads, shape)
    shape, runs = replace(shape, period_s=round(period_s, 2)), []
    for number in range(n_runs):
        for system in (STOCK, OURS) if number % 2 == 0 else (OURS, STOCK):
            run = await _run(system, loads[system], shape, number)
            runs.append(run)
            _say(
                f"run {len(runs)} of {2 * n_runs}: {system:<5} met {run.attainment:.2f}, objective "
                f"{run.objective_s * 1e3:.0f} ms, {run.output_tokens_s:.0f} tokens/s, load {run.load_average:.1f}"
            )
    for load in loads.values():
        await load.close()
    return shape, runs


async def _warm_up(loads: dict[str, Load], shape: Shape) -> float:
    """Have each server compute what it will be asked for; returns a long prompt's least TTFT in seconds, unloaded.

    The least, since whatever else the machine does only lengthens it: the engine is not to be left idle later.
    """
    calls = CallSource(replace(shape, period_s=0.5, longs=4), "warm-up")
    ttfts_s: list[float] = []
    for load in loads.values():
        await load.on_time(calls.run(), OBJECTIVE * await _unloaded_ttft_s(load, calls))
        ttfts_s += [one.ttft_s for one in await load.one_by_one([calls.long() for _ in range(4)])]
    return min(ttfts_s)


async def _run(system: str, load: Load, shape: Shape, number: int) -> Run:
    """One run; both systems are sent the same calls in the runs of a number, and no call twice."""
    source, load_average = CallSource(shape, f"run {number}"), os.getloadavg()[0]
    calls, unloaded_ttft_s = source.run(), await _unloaded_ttft_s(load, source)
    served = await load.on_time(calls, OBJECTIVE * unloaded_ttft_s)
    return figures(system, number, load_average, unloaded_ttft_s, served)


async def _unloaded_ttft_s(load: Load, source: CallSource) -> float:
    """The median TTFT of short calls that have the engine for themselves."""
    return median(one.ttft_s for one in await load.one_by_one([source.short() for _ in range(UNLOADED_CALLS)]))


def _table(runs: Sequence[Run]) -> str:
    """Each run in the order of running, then the medians."""
    rows = [(f"{run.system} {run.number}", asdict(run)) for run in runs]
    rows += [(f"{system} (median)", medians(runs, system)) for system in (STOCK, OURS)]
    lines = [f"{'':<16}" + "".join(f"{heading:>14}" for heading, _, _ in COLUMNS.values())]
    for name, row in rows:
        cells = [f"{row[figure] * factor:>14.{digits}f}" for figure, (_, factor, digits) in COLUMNS.items()]
        lines.append(f"{name:<16}" + "".join(cells))
    return "\n".join(lines)


def _inputs(engine: Engine, emulated: str | None, shape: Shape, servers: dict[str, RealEngine]) -> dict[str, Any]:
    """What the figures depend on."""
    computed = "on the CPU, a tiny Llama with random weights in float32"
    return {
        "engine": f"{engine.title}, " + (computed if emulated is None else f"forward passes emulated by {emulated}"),
        "arguments": {system: " ".join(arguments_of(server)) for system, server in servers.items()},
        "workload": asdict(shape),
        "objective": f"TTFT of short calls: {OBJECTIVE:g} x the median of {UNLOADED_CALLS} unloaded ones",
        "cpus": os.cpu_count(),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
