"""What a plain call costs the gateway in CPU time, in one checkout or several: `python -m benchmarks plain_call`.

`[--checkout FOLDER ...]` compares gateways of other checkouts, which use the packages of this environment. Each gateway
is a process, as is each engine, which answers from memory. The gateways take turns. The clients keep their connections.
The minimum is the figure to compare: other processes can only add to it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import uvloop

from benchmarks.plain.answering_engine import MODEL, PACED
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from e2e.faults.raw_client import CHAT, Client
from e2e.ports import free_port
from e2e.server_process import eventually

HERE: Final = Path(__file__).parents[1]
PROMPT: Final = "Tell me how a gateway places calls. " * 12
WARM_UP_CALLS: Final = 300


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of call. The tokens of a `paced` stream come one by one."""

    name: str
    tokens: int
    concurrency: int
    stream: bool = True
    paced: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """The request."""
        messages = [{"role": "user", "content": PROMPT}]
        pace = {"seed": PACED} if self.paced else {}
        return {"model": MODEL, "messages": messages, "max_tokens": self.tokens, "stream": self.stream, **pace}


SHAPES: Final = (
    Shape("a whole answer, one client", 8, 1, stream=False),
    Shape("a whole answer, 16 clients", 8, 16, stream=False),
    Shape("8 tokens at once, one client", 8, 1),
    Shape("8 tokens at once, 16 clients", 8, 16),
    Shape("64 tokens at once, 16 clients", 64, 16),
    Shape("8 tokens one by one, 16 clients", 8, 16, paced=True),
    Shape("64 tokens one by one, 16 clients", 64, 16, paced=True),
)


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    checkout: Path
    port: int
    pid: int

    @property
    def cpu_s(self) -> float:
        """The CPU time of all its threads so far."""
        return time.clock_gettime((~self.pid << 3) | 2)  # as clock_getcpuclockid of Linux makes it

    async def is_ready(self) -> bool:
        """Whether it takes calls."""
        async with Client(self.port, 1.0) as client:
            return (await client.get("/ready")).status == 200


def main() -> int:
    """Measure, print and write, in seconds of CPU a call."""
    parser = timed_parser(__doc__, rounds=7)
    parser.add_argument("--checkout", type=Path, action="append", default=[], help="another one; the first is the base")
    parser.add_argument("--calls", type=int, default=400, help="of each shape in a round (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=4, help="of each gateway (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="the shapes whose name contains this")
    parser.add_argument("--log-level", default="info", help="of the gateways (default: %(default)s)")
    arguments = parser.parse_args()
    shapes = [shape for shape in SHAPES if arguments.only in shape.name]
    checkouts = [*(path.resolve() for path in arguments.checkout), HERE]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ports = [free_port() for _ in range(arguments.engines)]
        for port in ports:
            engine = [sys.executable, "-m", "benchmarks.plain.answering_engine", str(port)]
            stack.enter_context(_process(engine, HERE, Path(folder) / f"engine-{port}.log"))
        gateways = [
            stack.enter_context(_gateway(path, ports, arguments.log_level, Path(folder) / f"{number}"))
            for number, path in enumerate(checkouts)
        ]
        times = uvloop.run(_measure(gateways, shapes, arguments.rounds, arguments.calls))
    results = [
        {"shape": asdict(shape), "checkout": path, "cpu_s": times[shape.name][number]}
        for shape in shapes
        for number, path in enumerate(checkouts)
    ]
    lines = [_line(shape, times[shape.name]) for shape in shapes]
    return finish("plain_call", Report(lines=lines, claims=[], results=results, is_timed=True), arguments)


async def _measure(
    gateways: Sequence[Gateway], shapes: Sequence[Shape], rounds: int, calls: int
) -> dict[str, list[list[float]]]:
    """The CPU seconds of a call, by shape, then by gateway."""
    times: dict[str, list[list[float]]] = {shape.name: [[] for _ in gateways] for shape in shapes}
    clients = [Client(gateway.port) for gateway in gateways]
    for client in clients:
        await _load(client, SHAPES[-1], WARM_UP_CALLS)
    for number in range(rounds):
        for shape in shapes:
            for place in range(len(gateways)):
                turn = (place + number) % len(gateways)
                await _load(clients[turn], shape, 2 * shape.concurrency)
                before_s = gateways[turn].cpu_s
                await _load(clients[turn], shape, calls)
                times[shape.name][turn].append((gateways[turn].cpu_s - before_s) / calls)
    for client in clients:
        await client.close()
    return times


async def _load(client: Client, shape: Shape, calls: int) -> None:
    left = iter(range(calls))

    async def work() -> None:
        for _ in left:
            answer = await client.post(CHAT, shape.body)
            assert answer.status == 200, answer
            assert not answer.broken, answer

    await asyncio.gather(*(work() for _ in range(shape.concurrency)))


def _line(shape: Shape, times: Sequence[Sequence[float]]) -> str:
    least = [min(one) * 1e6 for one in times]
    middle = [median(one) * 1e6 for one in times]
    figures = "   ".join(f"{low:5.0f} ({mid:5.0f})" for low, mid in zip(least, middle, strict=True))
    ratio = f"   {least[-1] / least[0]:.3f}" if len(least) > 1 else ""
    return f"{shape.name:<34}{figures} us, minimum (median){ratio}"


@contextmanager
def _gateway(checkout: Path, engine_ports: Sequence[int], level: str, folder: Path) -> Iterator[Gateway]:
    folder.mkdir()
    port, config = free_port(), folder / "plait.toml"
    config.write_text(
        f'[server]\nport = {port}\n[log]\nlevel = "{level}"\nformat = "json"\n[[models]]\nname = "{MODEL}"\n'
        + "".join(f'[[engines]]\nurl = "http://127.0.0.1:{engine_port}"\n' for engine_port in engine_ports)
    )
    command = [sys.executable, "-m", "plait.gateway.cli", "serve", "--config", str(config)]
    with _process(command, checkout, folder / "gateway.log") as process:
        gateway = Gateway(checkout, port, process.pid)
        eventually(lambda: asyncio.run(gateway.is_ready()))
        yield gateway


@contextmanager
def _process(command: Sequence[str], checkout: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that imports `plait` from a checkout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(checkout)])}
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)  # noqa: S603
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
