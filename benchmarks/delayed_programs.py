"""Programs over a network with a delay, by each front end and chained by hand: `python -m benchmarks delayed_programs`.

A gateway with emulated engines in real time, behind a proxy that delays each byte by half a round trip. Each front end
runs the same programs without and with the delay. The front ends take turns, and no two runs share a text. The set-up
of a connection costs no round trip, and clients keep theirs, so that only requests are counted. The clock is real, and
whatever else runs on the machine only adds to a time. So the least times of all rounds are compared.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish, table
from e2e.delaying_proxy import DelayingProxy
from e2e.front_ends import LINKS, MAPS, OUTPUT_TOKENS, PART_WORDS, FrontEnds, document, front_ends
from e2e.servers import Fleet, Launcher
from plait.lab.simulation.claim import Claim

ROUND_TRIP_S: Final = 0.25
BY_HAND: Final = "by hand"
LINK_TOKENS: Final = 4
"""Short answers, as of calls that decide or extract. By hand, a chain of n calls of t seconds takes n (t + r), and as a
program n t + r. So it is twice as fast only if t is below (n - 2) / n round trips r: here 7 tokens.
"""
CHAIN: Final = f"chain of {LINKS}"
WITHIN: Final = {"headers": 1.10}
"""What a front end may take, in a round trip and its time without delay; the others 1.05."""
SOONER: Final = 2.0

Times = Mapping[str, Mapping[str, list[float]]]
"""Seconds, by program and by front end."""
Run = Callable[[], Awaitable[object]]


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim fails."""
    parser = timed_parser(__doc__, rounds=5)
    parser.add_argument("--engines", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Launcher(Path(folder)) as launch:
        engines = [launch.engine(f"e{number}", time_scale=1) for number in range(arguments.engines)]
        fleet = Fleet(launch.gateway(engines), {engine.name: engine for engine in engines})
        fleet.start()
        with DelayingProxy(fleet.gateway.port) as proxy:
            near, far = asyncio.run(measure(proxy, arguments.rounds))
    return finish("delayed_programs", _report(near, far), arguments)


def _report(near: Times, far: Times) -> Report:
    columns = ["program", "front end", "no delay", "250 ms", "250 ms / (one round trip + no delay)", "by hand / this"]
    rows = (
        [
            *(program, kind, _shown(near[program][kind]), _shown(times_s)),
            *(f"{_ratio(near, far, program, kind):.3f}", f"{_gain(far, program, kind):.2f}"),
        ]
        for program in near
        for kind, times_s in far[program].items()
    )
    return Report(
        lines=["The least of all rounds in seconds, with the median:", "", *table(columns, rows)],
        claims=list(_claims(near, far)),
        results=[{"no delay": near, "delay": far}],
        inputs={
            "round_trip_s": ROUND_TRIP_S,
            "map_reduce": {"maps": MAPS, "part_words": PART_WORDS, "output_tokens": OUTPUT_TOKENS},
            "chain": {"links": LINKS, "output_tokens": LINK_TOKENS},
        },
        is_timed=True,
    )


async def measure(proxy: DelayingProxy, rounds: int) -> tuple[Times, Times]:
    """The times without and with the delay. The first round is left out: it opens the connections."""
    near: Times = defaultdict(lambda: defaultdict(list))
    far: Times = defaultdict(lambda: defaultdict(list))
    dice = random.Random("turns")
    async with front_ends(proxy.url) as clients:
        for number in range(rounds + 1):
            for delay_s, times in dice.sample([(0.0, near), (ROUND_TRIP_S, far)], 2):
                proxy.round_trip_s = delay_s
                runs = list(_runs(clients, f"round {number}, delay {delay_s}"))
                for program, kind, run in dice.sample(runs, len(runs)):
                    took_s = await _timed(run)
                    await asyncio.sleep(2 * delay_s + 0.05)  # the end of the program's session is no part of the next
                    if number:
                        times[program][kind].append(took_s)
    return _sorted(near), _sorted(far)


def _runs(clients: FrontEnds, seed: str) -> Iterator[tuple[str, str, Run]]:
    """Each program by each front end: names, and what runs it."""
    for kind, map_reduce in clients.map_reduces().items():
        parts = document(f"{seed}, {kind}")
        yield f"map-reduce {MAPS} + 1", kind, lambda run=map_reduce, parts=parts: run(parts)  # type: ignore[misc]
    for kind, chain in clients.chains(LINK_TOKENS).items():
        yield CHAIN, kind, lambda run=chain, text=f"{seed}, {kind}": run(text)  # type: ignore[misc]


async def _timed(run: Run) -> float:
    began_s = time.perf_counter()
    await run()
    return time.perf_counter() - began_s


def _sorted(times: Times) -> Times:
    """The programs and the front ends in alphabetical order: they ran in any."""
    return {program: dict(sorted(kinds.items())) for program, kinds in sorted(times.items())}


def _shown(times_s: Sequence[float]) -> str:
    return f"{min(times_s):.2f} ({median(times_s):.2f})"


def _ratio(near: Times, far: Times, program: str, kind: str) -> float:
    """Its time with the delay by one round trip and its time without."""
    return min(far[program][kind]) / (ROUND_TRIP_S + min(near[program][kind]))


def _gain(far: Times, program: str, kind: str) -> float:
    """How many times as long it takes by hand."""
    return min(far[program][BY_HAND]) / min(far[program][kind])


def _claims(near: Times, far: Times) -> Iterator[Claim]:
    """Fixed targets."""
    for program, kinds in far.items():
        for kind in (kind for kind in kinds if kind != BY_HAND):
            ratio, most = _ratio(near, far, program, kind), WITHIN.get(kind, 1.05)
            name = f"{program}, {kind}: delayed / (a round trip + not delayed)"
            yield Claim(name, ratio, most=most)
            gain = _gain(far, program, kind)
            target = SOONER if program == CHAIN else 1.0
            yield Claim(f"{program}, {kind}: by hand / this", gain, least=target)


if __name__ == "__main__":
    sys.exit(main())
