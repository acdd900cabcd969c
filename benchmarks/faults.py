"""One engine of a fleet goes wrong, and is healed later, for Plait and its peers: `python -m benchmarks faults`.

1,000 calls at concurrency 64 on two and on four scripted engines, one of which is faulty from the start of the load.
All gateways have their default settings and the same load, which is a process of its own. The peers are sglang-router,
smg and vllm-router, each from the package index in an environment of its own (`--install-peers`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import nan
from typing import Final

from benchmarks.faulting.cases import CASES, QUICK, Case, Sign
from benchmarks.faulting.gateways import GATEWAYS, PLAIT, Gateway, install, versions
from benchmarks.faulting.measurement import BACK_CAP_S, CONCURRENCY, Result, measure
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from plait.lab.simulation.claim import Claim

CALLS, QUICK_CALLS = 1000, 400
FLEETS, QUICK_FLEETS = (2, 4), (2,)
SUCCESS_SHARE: Final = 0.995
BACK_WITHIN_S: Final = 5.0


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim fails."""
    parser = timed_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="three cases, one fleet, fewer calls")
    parser.add_argument("--install-peers", action="store_true", help="install the peers first")
    names = [gateway.name for gateway in GATEWAYS]
    parser.add_argument("--gateway", action="append", choices=names, help="only this one (default: all installed)")
    parser.add_argument("--engines", type=int, action="append", help="only fleets of so many (default: 2 and 4)")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only this one")
    arguments = parser.parse_args()
    if arguments.install_peers:
        install()
    gateways = [
        gateway for gateway in GATEWAYS if gateway.is_installed and gateway.name in (arguments.gateway or names)
    ]
    wanted = arguments.case or (QUICK if arguments.quick else [case.name for case in CASES])
    cases = [case for case in CASES if case.name in wanted]
    fleets, calls = (QUICK_FLEETS, QUICK_CALLS) if arguments.quick else (FLEETS, CALLS)
    fleets = arguments.engines or fleets
    results = asyncio.run(_measure_all(cases, fleets, gateways, calls))
    report = Report(
        lines=[],
        claims=list(claims(results)),
        results=[asdict(result) for result in results],
        inputs={"concurrency": CONCURRENCY, "peers": versions()},
        is_timed=True,
    )
    return finish("faults", report, arguments)


async def _measure_all(
    cases: Sequence[Case], fleets: Sequence[int], gateways: Sequence[Gateway], calls: int
) -> list[Result]:
    print(f"{'case':<18}{'engines':>8}  {'gateway':<14}{'success':>9}{'out':>9}{'back':>9}{'p50':>9}{'p99':>9}  wrong")
    results = []
    for case in cases:
        for engines in fleets:
            for gateway in gateways:
                result = await measure(case, engines, gateway, calls)
                results.append(result)
                print(_row(result, case), flush=True)
    return results


def claims(results: Sequence[Result]) -> Iterator[Claim]:
    """What Plait is to do in each case."""
    by_name = {case.name: case for case in CASES}
    for result in results:
        if result.gateway != PLAIT.name:
            continue
        case = by_name[result.case]
        where = f"{case.name}, one of {result.engines}"
        yield _claim(f"{where}: share of calls that succeed", result.success_share, SUCCESS_SHARE, at_least=True)
        if case.sign is not Sign.STAYS:
            yield _claim(f"{where}: time until the engine is out (s)", result.out_s, case.out_within_s)
        yield _claim(f"{where}: time until it is back (s)", result.back_s, BACK_WITHIN_S)


def _claim(name: str, value: float | None, limit: float, *, at_least: bool = False) -> Claim:
    """A value that never came is no number, and holds nothing."""
    found = nan if value is None else value
    return Claim(name, found, least=limit) if at_least else Claim(name, found, most=limit)


def _row(result: Result, case: Case) -> str:
    out = "-" if case.sign is Sign.STAYS else _seconds(result.out_s, "never")
    back = _seconds(result.back_s, f"> {BACK_CAP_S:g} s")
    times = f"{result.p50_s:>7.2f} s{result.p99_s:>7.2f} s"
    wrong = ", ".join(f"{count} {what}" for what, count in result.wrong.items())
    head = f"{result.case:<18}{result.engines:>8}  {result.gateway:<14}{result.success_share:>9.1%}"
    return f"{head}{out:>9}{back:>9}{times}  {wrong}"


def _seconds(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
