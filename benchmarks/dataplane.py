"""What a request costs a router, ours and others: `python -m benchmarks dataplane`.

All routers run over the same two engines, which answer from memory, and take turns row by row and round by round. CPU
is the kernel's accounting of a router's processes. The minimum of the rounds is the figure, because other processes can
only add to it. No body repeats. Plait runs as it ships, with a BPE of 48,000 entries, once its encoder has proved
itself. `--counts` counts Python calls instead, `--instructions` those of the processor, `--memory N` shows Plait's
memory over N requests.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from benchmarks.plain import counts, instructions, memory
from benchmarks.plain.peers import NGINX, PEERS, environment, has_nginx, nginx_command
from benchmarks.plain.routers import Router, plait_command, running_engine, running_router
from benchmarks.plain.rows import OF_OTHER_APIS, ROWS, TEMPLATES, Row
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from e2e.faults.raw_client import CHAT, Answer, Client
from plait.backends.tokenization.checked_encoder import PROVING_PROMPTS
from plait.lab.simulation.claim import Claim

ENGINES: Final = 2
BASELINES: Final = ("sglang-router, cache aware", "vllm-router, cache aware")
OURS: Final = "plait"
WORKERS: Final = f"{OURS}, in workers"
LINE: Final = f"{OURS}, in the line"
RUNNING: Final = 4
"""Calls at once, of the 8 of most rows."""
SPREAD_REQUESTS, SPREAD_PER_S = 200, 100.0


def main() -> int:
    """Measure and print; returns 1 if a claim does not hold."""
    parser = timed_parser(__doc__, rounds=5)
    parser.add_argument("--only", default="", metavar="ROWS", help="the letters of the rows, such as ABC")
    parser.add_argument("--routers", default="", metavar="TEXT", help="beside ours, those whose name contains this")
    parser.add_argument("--checkout", type=Path, action="append", default=[], help="another Plait to measure beside")
    parser.add_argument("--workers", type=int, metavar="N", help="ours in so many processes, too")
    parser.add_argument(
        "--line", action="store_true", help=f"ours, too, where all but {RUNNING} calls wait in the line"
    )
    parser.add_argument("--counts", action="store_true", help="count functions, files and rooms of a request, and end")
    parser.add_argument("--instructions", action="store_true", help="count ours of a request with valgrind, and end")
    parser.add_argument("--memory", type=int, metavar="N", help="show our memory over N requests, and end")
    arguments = parser.parse_args()
    if arguments.counts:
        return counts.main()
    if arguments.memory:
        return memory.main(arguments.memory)
    rows = [row for row in (*ROWS, *OF_OTHER_APIS) if row.name in arguments.only] if arguments.only else [*ROWS]
    if arguments.instructions:
        return instructions.main(rows, [Path(__file__).parents[1], *arguments.checkout])
    environment()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = [
            stack.enter_context(running_engine(Path(folder) / f"engine-{number}.log")) for number in range(ENGINES)
        ]
        routers = list(_started(stack, engines, arguments, Path(folder)))
        uvloop.run(_measure(routers, rows, arguments.rounds, arguments.workers or 1))
    report = Report(
        lines=list(_table(routers, rows)),
        claims=list(_claims({router.name: router for router in routers})),
        results=[{"router": router.name, "cpu_s": router.cpu_s, "first_ms": router.first_ms} for router in routers],
        is_timed=True,
    )
    return finish("dataplane", report, arguments)


def _started(stack: ExitStack, engines: Sequence[str], arguments: argparse.Namespace, folder: Path) -> Iterator[Router]:
    here = Path(__file__).parents[1]
    for template in TEMPLATES:
        for checkout in (here, *arguments.checkout):
            place = "" if checkout == here else f" of {checkout.name}"
            name = f"{OURS}{place}" if template == "short" else f"{OURS}{place}, {template}"
            command = partial(plait_command, template, engines, folder)
            yield stack.enter_context(running_router(name, command, folder, checkout))
    if arguments.workers:
        command = partial(plait_command, "short", engines, folder, workers=arguments.workers)
        yield stack.enter_context(running_router(WORKERS, command, folder, here))
    if arguments.line:
        command = partial(plait_command, "short", engines, folder, settings=f"[admission]\nmax_running = {RUNNING}\n")
        yield stack.enter_context(running_router(LINE, command, folder, here))
    for name, peer in PEERS.items():
        if arguments.routers in name:
            yield stack.enter_context(running_router(name, partial(peer.command, engines), folder, here))
    if has_nginx() and arguments.routers in NGINX:
        yield stack.enter_context(running_router(NGINX, partial(nginx_command, engines, folder), folder, here))


async def _measure(routers: Sequence[Router], rows: Sequence[Row], rounds: int, processes: int) -> None:
    clients = [Client(router.port) for router in routers]
    numbers = count()
    for router, client in zip(routers, clients, strict=True):
        if router.name.startswith(OURS):
            workers = processes if router.name == WORKERS else 1
            await _load(client, replace(ROWS[0], requests=PROVING_PROMPTS * workers), numbers)
    for number in range(rounds + 1):  # the first warms up
        for row in rows:
            for place in range(len(routers)):
                turn = (place + number) % len(routers)
                router = routers[turn]
                before_s = router.total_cpu_s()
                await _load(clients[turn], row, numbers)
                if number:
                    router.cpu_s.setdefault(row.name, []).append((router.total_cpu_s() - before_s) / row.requests)
        for router, client in zip(routers, clients, strict=True):
            if number:
                router.first_ms.append(await _first_bytes(client, numbers))
                router.rss_mb.append(router.resident_mb())
    for client in clients:
        await client.close()


async def _load(client: Client, row: Row, numbers: Iterator[int]) -> None:
    left = iter(range(row.requests))

    async def work() -> None:
        for _ in left:
            _check(await client.post(row.path, row.body(next(numbers)), row.headers))

    await asyncio.gather(*(work() for _ in range(row.concurrency)))


async def _first_bytes(client: Client, numbers: Iterator[int]) -> float:
    """The median time to the first byte of streams that arrive evenly, in ms."""
    row = ROWS[0]
    asked = []
    for _ in range(SPREAD_REQUESTS):
        body = {**row.body(next(numbers)), "stream": True}
        asked.append(asyncio.create_task(client.post(CHAT, body)))
        await asyncio.sleep(1 / SPREAD_PER_S)
    answers = [_check(await answer) for answer in asked]
    return median((answer.first_s or answer.ended_s) - answer.began_s for answer in answers) * 1e3


def _check(answer: Answer) -> Answer:
    assert answer.status == 200, answer
    assert not answer.broken, answer
    return answer


def _table(routers: Sequence[Router], rows: Sequence[Row]) -> Iterator[str]:
    yield "CPU of a request, ms (minimum of the rounds); first byte of spread arrivals, ms (median); resident MB"
    for row in rows:
        yield f"{row.name}: {row.what}; {row.tokens} tokens out"
    yield ""
    yield "| router | " + " | ".join(row.name for row in rows) + " | first byte | MB |"
    yield "|---" * (len(rows) + 3) + "|"
    for router in routers:
        figures = " | ".join(f"{min(router.cpu_s[row.name]) * 1e3:.3f}" for row in rows)
        yield f"| {router.name} | {figures} | {median(router.first_ms):.2f} | {router.rss_mb[-1]:.0f} |"


def _claims(routers: dict[str, Router]) -> Iterator[Claim]:
    """Against the others, and in workers against one process."""
    ours, others = routers[OURS], [routers[name] for name in BASELINES if name in routers]
    if WORKERS in routers:
        for name, most in (("A", 1.2), ("B", 1.15), ("S", 1.15)):
            if name in ours.cpu_s:
                ratio = min(routers[WORKERS].cpu_s[name]) / min(ours.cpu_s[name])
                yield Claim(f"CPU of {name}, in workers / in one process", ratio, most=most)
    if not others:
        return
    for name, most in (("A", 1.8), ("S", 1.2)):
        if name in ours.cpu_s:
            least = min(min(other.cpu_s[name]) for other in others)
            ratio = min(ours.cpu_s[name]) / least
            yield Claim(f"CPU of {name}, ours / the lower of the cache-aware routers", ratio, most=most)
    if BASELINES[1] in routers:
        late = median(ours.first_ms) - median(routers[BASELINES[1]].first_ms)
        yield Claim("first byte at spread arrivals, ours - vllm-router's (ms)", late, most=1.0)


if __name__ == "__main__":
    sys.exit(main())
