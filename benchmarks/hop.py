"""What a hop costs the gateway, and what held calls cost the others: CPU time and memory, in one process.

`python -m benchmarks hop [--rounds N] [--json PATH]`. A hop is the way from a call's answer to the call that takes its
value, at the engine. The whole gateway but for sockets, with its log; its engine is a stub in the same process. Rounds
take turns between a gateway that holds nothing and the same one with 10,000 held calls in 1,000 sessions. Beside those,
each round has a program of 64 calls and 8 gets for each criterion of a get.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.chaining.figures import Times
from benchmarks.chaining.measurement import (
    CALLS_A_SESSION,
    CHAIN_CALLS,
    CHAINS,
    CRITERIA,
    HELD_SESSIONS,
    PROMPT,
    Measurement,
)
from benchmarks.chaining.served import Served
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from plait.gateway.log.events import configure_logging
from plait.gateway.server.full_collections import FullCollections

WARM_UP_CALLS = 300
PLAIN_CALLS = 200
"""In each round."""


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim fails."""
    arguments = timed_parser(__doc__, rounds=15).parse_args()
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        configure_logging("info", "json")
        times, held_bytes = uvloop.run(_measure(arguments.rounds))
    lines = [
        f"{name:<62} p50 {spread.p50_s * 1e6:7.0f} us   p99 {spread.p99_s * 1e6:7.0f} us"
        for name, spread in times.spreads().items()
    ]
    lines.append(f"{'memory of a held call':<62}     {held_bytes:7,.0f} bytes")
    results = [{"held_call_bytes": held_bytes, **times.report()}]
    report = Report(lines=lines, claims=list(times.claims()), results=results, inputs=_inputs(), is_timed=True)
    return finish("hop", report, arguments)


async def _measure(rounds: int) -> tuple[Times, float]:
    """The CPU times, and the bytes of a held call."""
    measurement, times = Measurement(Served()), Times(hops={name: [] for name in CRITERIA})
    await measurement.plain(WARM_UP_CALLS)
    await measurement.program(None)
    FullCollections(asyncio.get_running_loop()).start()  # as the gateway does
    for _ in range(rounds):
        times.plain_s += await measurement.plain(PLAIN_CALLS)
        await measurement.hold()
        times.plain_beside_s += await measurement.plain(PLAIN_CALLS)
        for name, criteria in CRITERIA.items():
            times.hops[name] += await measurement.program(criteria)
        await measurement.let_go()
    return times, await measurement.held_bytes()


def _inputs() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "in_a_round": {"plain_calls": PLAIN_CALLS, "chains": CHAINS, "calls_a_chain": CHAIN_CALLS},
        "criteria": list(CRITERIA),
        "held": {"sessions": HELD_SESSIONS, "calls_a_session": CALLS_A_SESSION},
        "prompt_characters": len(PROMPT),
        "answer_characters": len(PROMPT),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
