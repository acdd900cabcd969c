"""What one tenant notices of another that does not behave: `python -m benchmarks neighbours --json PATH`.

Each case starts a gateway and its engines. One tenant calls at a steady rate, first alone and then beside the other.
Its p99 may move by 100 ms, and the gateway may grow by what is configured. Both parts of a case are measured one after
the other, and the first is repeated until the machine is quiet.

With `--turns` the gateway runs on asyncio's loop, and the longest turn of that is measured too, in CPU time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.chaining.figures import Spread
from benchmarks.faulting.bad_clients import SHORT_MODEL
from benchmarks.faulting.gateways import plait, process
from benchmarks.faulting.measurement import until_engine
from benchmarks.neighbouring.attacks import ATTACKS
from benchmarks.neighbouring.tenant import Tenant, Times
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from e2e.faults.completions import LARGE_MODEL, LONG_MODEL
from e2e.faults.fleet import ScriptedEngine
from e2e.ports import free_ports
from plait.lab.simulation.claim import Claim

MODEL: Final = "demo"
KEYS: Final = ("well", "badly")
SERVER: Final = f"""api_keys = {json.dumps(KEYS)}
trust_request_chat_template = true"""
CONTEXTS: Final = {MODEL: 32_768, SHORT_MODEL: 32_768, LARGE_MODEL: 4_000_000, LONG_MODEL: 32_768}
MODELS: Final = "\n".join(
    f'[[models]]\nname = "{model}"\ntokenizer = "embedded"\nmax_context_tokens = {tokens}'
    for model, tokens in CONTEXTS.items()
)
WARM_S, BEFORE_S = 2.0, 8.0
BEGIN_S: Final = 1.0
"""The other tenant is at work for so long before its neighbour is measured."""
QUIET_P99_S, QUIET_TRIES = 0.04, 10
"""A case begins once the tenant's short calls are quick: others may use the machine too. Some tries, then it begins."""
MOVED_MOST_S: Final = 0.1
LONGEST_TURN_S: Final = 0.02
MEBIBYTE: Final = 2**20


@dataclass(frozen=True)
class Result:
    """One case. Memory in bytes: the gateway's before the attack, and the most during it."""

    case: str
    what: str
    before: Spread
    during: Spread
    long_before: Spread
    long_during: Spread
    failed: int
    rss_bytes: int
    peak_rss_bytes: int
    answered: dict[str, int]
    longest_turn_s: float = 0.0
    longest_collection_s: float = 0.0

    @property
    def moved_s(self) -> float:
        """By how much the p99 of short calls moved."""
        return self.during.p99_s - self.before.p99_s

    @property
    def long_moved_s(self) -> float:
        """By how much the p99 of prompts of 20 kB moved."""
        return self.long_during.p99_s - self.long_before.p99_s


def main() -> int:
    """Run the cases, print, write what was asked for; returns 1 if a claim fails."""
    parser = timed_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="CASE")
    parser.add_argument("--turns", action="store_true", help="time the turns of the event loop")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.2f} before the first case{HEAD}")
    results = []
    for name in arguments.only:
        results.append(asyncio.run(_measured(name, times_turns=arguments.turns)))
        print(_row(results[-1]), flush=True)
    report = Report(
        lines=[],
        claims=[claim for result in results for claim in _claims(result)],
        results=[asdict(result) for result in results],
        inputs={"load_before": load},
        is_timed=True,
    )
    return finish("neighbours", report, arguments)


def _claims(result: Result) -> Iterator[Claim]:
    moved_ms = 1e3 * max(result.moved_s, result.long_moved_s)
    yield Claim("how much longer the other's p99 is (ms)", moved_ms, most=1e3 * MOVED_MOST_S, where=result.what)
    if result.longest_turn_s:  # they were timed
        yield Claim("longest turn (ms)", 1e3 * result.longest_turn_s, most=1e3 * LONGEST_TURN_S, where=result.what)


async def _measured(name: str, *, times_turns: bool) -> Result:
    ports = free_ports(6)
    well = ScriptedEngine("well", [MODEL], ports[0], ports[1])
    badly = ScriptedEngine("badly", [SHORT_MODEL, LARGE_MODEL, LONG_MODEL], ports[2], ports[3])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-neighbours-")))
        for engine in (well, badly):
            stack.enter_context(process(_engine_command(engine), folder / f"{engine.name}.log"))
            await until_engine(engine)
        command = plait(ports[4:], [well.url, badly.url], folder, MODELS, SERVER)
        if times_turns:
            command = [*command[:2], "benchmarks.neighbouring.timed_gateway", str(folder / "turn"), *command[3:]]
        gateway = stack.enter_context(process(command, folder / "gateway.log"))
        tenant = Tenant(ports[4], MODEL, KEYS[0])
        await _until_up(tenant)
        await tenant.call(WARM_S)
        for _ in range(QUIET_TRIES):
            before = await tenant.call(BEFORE_S)
            if Spread.of(before.short_s).p99_s < QUIET_P99_S:
                break
        rss_bytes = _memory(gateway.pid, "VmRSS")
        _forget_peak(gateway.pid)
        await _longest_turns(gateway.pid, folder, times_turns=times_turns)
        during_s = ATTACKS[name].measured_s
        words = [str(ports[4]), KEYS[1], name, str(BEGIN_S + during_s)]
        attack = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.neighbouring.attacks", *words, stdout=asyncio.subprocess.PIPE
        )
        await asyncio.sleep(BEGIN_S)
        during = await tenant.call(during_s)
        answered = json.loads((await attack.communicate())[0])
        peak_bytes = _memory(gateway.pid, "VmHWM")
        longest = await _longest_turns(gateway.pid, folder, times_turns=times_turns)
    return Result(
        name,
        ATTACKS[name].what,
        Spread.of(before.short_s),
        Spread.of(during.short_s),
        Spread.of(before.long_s),
        Spread.of(during.long_s),
        before.failed + during.failed,
        rss_bytes,
        peak_bytes,
        answered,
        *longest,
    )


async def _until_up(tenant: Tenant) -> None:
    """Until calls get good answers. Raises `RuntimeError` if that takes too long."""
    for _ in range(60):
        times: Times = await tenant.call(0.1)
        if not times.failed:
            return
        await asyncio.sleep(0.5)
    raise RuntimeError("the gateway does not get ready")


def _engine_command(engine: ScriptedEngine) -> list[str]:
    command = [sys.executable, "-m", "e2e.faults.scripted_engine", "--name", engine.name]
    command += ["--model", ",".join(engine.models), "--port", str(engine.port)]
    return [*command, "--control-port", str(engine.control_port)]


async def _longest_turns(pid: int, folder: Path, *, times_turns: bool) -> tuple[float, float]:
    """The longest turn and the longest full collection since this was asked last, in seconds of CPU time.

    0 where the gateway does not time them.
    """
    if not times_turns:
        return 0.0, 0.0
    path = folder / "turn"
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    for _ in range(200):
        await asyncio.sleep(0.05)
        if path.exists() and (text := path.read_text()):
            turn_s, collection_s = map(float, text.split())
            return turn_s, collection_s
    raise RuntimeError("the gateway does not say how long its turns were")


def _forget_peak(pid: int) -> None:
    """Count the peak of the memory anew (`man 5 proc`)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _memory(pid: int, name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024 * int(fields[name].split()[0])


HEAD: Final = """
| one tenant sends | the other's p99 before, during (ms): short calls | 20 kB prompts | memory, peak (MiB) | answers |
|---|---|---|---|---|"""


def _row(result: Result) -> str:
    def pair(before: Spread, during: Spread) -> str:
        return f"{1e3 * before.p99_s:.0f}, {1e3 * during.p99_s:.0f}"

    answers: Sequence[Any] = [f"{number} x {status}" for status, number in result.answered.items()]
    memory = f"{result.rss_bytes // MEBIBYTE}, {result.peak_rss_bytes // MEBIBYTE}"
    turn_ms, collection_ms = 1e3 * result.longest_turn_s, 1e3 * result.longest_collection_s
    turn = f"; longest turn {turn_ms:.0f} ms, full collection {collection_ms:.0f} ms" if turn_ms else ""
    failed = f"; {result.failed} of the neighbour's failed" if result.failed else ""
    return (
        f"| {result.what} | {pair(result.before, result.during)} | {pair(result.long_before, result.long_during)} "
        f"| {memory} | {', '.join(answers)}{failed}{turn} |"
    )


if __name__ == "__main__":
    sys.exit(main())
