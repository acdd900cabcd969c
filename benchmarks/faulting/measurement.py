"""One case on one gateway: a fleet is started, one engine of it goes wrong, and is healed later."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.chaining.figures import Spread
from benchmarks.faulting.cases import Case, Sign
from benchmarks.faulting.gateways import Gateway, process
from benchmarks.faulting.presence import Presence
from e2e.faults.fleet import ScriptedEngine
from e2e.faults.raw_client import CHAT, Client
from e2e.faults.verdicts import is_good
from e2e.ports import free_ports

MODEL: Final = "demo"
CONCURRENCY: Final = 64
FIRST_S, TOKEN_S = 0.1, 0.0125
"""A call of 8 tokens takes 0.2 s on an engine."""
CALL_TIMEOUT_S: Final = 20.0
LOAD_WITHIN_S: Final = 45.0
"""The load is broken off then; calls that have not ended count as failed."""
FAULTY_S: Final = 6.0
"""An engine is faulty for at least so long."""
BACK_CAP_S: Final = 6.0
BACK_CALLS: Final = 5
"""An engine is back once so many calls got good answers there."""
READY_S: Final = 40.0


@dataclass(frozen=True, slots=True)
class Result:
    """`out_s` and `back_s` are None if it did not happen. `out_s` does not apply to an engine that should stay in."""

    case: str
    engines: int
    gateway: str
    calls: int
    success_share: float
    out_s: float | None
    back_s: float | None
    p50_s: float
    p99_s: float
    wrong: dict[str, int]


async def measure(case: Case, engines: int, gateway: Gateway, calls: int) -> Result:
    """Start everything, run the case, stop everything. Raises `RuntimeError` if the gateway does not get ready."""
    ports = free_ports(2 * engines + 2)
    fleet = [ScriptedEngine(f"e{n}", [MODEL], ports[2 * n], ports[2 * n + 1]) for n in range(engines)]
    port = ports[-2]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-faults-")))
        stack.enter_context(process(engines_command(fleet), folder / "engines.log"))
        await until_engine(fleet[0])
        stack.enter_context(
            process(gateway.command(ports[-2:], [engine.url for engine in fleet], folder), folder / "gateway.log")
        )
        await until_ready(port, folder / "gateway.log", engines)
        return await _run(case, fleet, gateway, port, calls)


async def _run(case: Case, fleet: Sequence[ScriptedEngine], gateway: Gateway, port: int, calls: int) -> Result:
    faulty = fleet[0]
    await faulty.set_mode(list(case.modes))
    words = [str(port), MODEL, str(calls), str(CONCURRENCY), str(CALL_TIMEOUT_S)]
    began_s = time.monotonic()
    pipe = asyncio.subprocess.PIPE
    load = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.faulting.load", *words, stdin=pipe, stdout=pipe, limit=2**24
    )
    assert load.stdin is not None
    assert load.stdout is not None
    try:
        outcome = await _measured(load.stdout)
        await asyncio.sleep(max(0.0, began_s + FAULTY_S - time.monotonic()))
        healed_s = time.monotonic()
        await faulty.heal()
        back_s = await _back_s(faulty, healed_s)
        load.stdin.write(b"\n")
        begun_s = msgspec.json.decode(await load.stdout.readline(), type=list[float]) if outcome else []
    finally:
        with suppress(ProcessLookupError):
            load.kill()
        await load.wait()
    stats = await faulty.stats(times=True)
    if outcome is None:
        return Result(case.name, len(fleet), gateway.name, 0, 0.0, None, back_s, 0.0, 0.0, {"not done in time": 1})
    presence = Presence(outcome["began_s"], healed_s, len(fleet), begun_s)
    out_s = _out_s(case.sign, stats, outcome, presence)
    spread = Spread.of(outcome["times_s"])
    return Result(
        case.name, len(fleet), gateway.name, outcome["calls"], outcome["good"] / outcome["calls"],
        out_s, back_s, spread.p50_s, spread.p99_s, outcome["wrong"],
    )  # fmt: skip


async def _measured(lines: asyncio.StreamReader) -> dict[str, Any] | None:
    """The outcome of the measured calls; None if they do not end."""
    try:
        async with asyncio.timeout(LOAD_WITHIN_S):
            outcome: dict[str, Any] = msgspec.json.decode(await lines.readline())
            return outcome
    except TimeoutError:
        return None


async def _back_s(faulty: ScriptedEngine, healed_s: float) -> float | None:
    """The time from healing until calls get good answers there again."""
    while time.monotonic() < healed_s + BACK_CAP_S:
        answered_s: list[float] = [at_s for at_s in (await faulty.stats(times=True))["answered_s"] if at_s > healed_s]
        if len(answered_s) >= BACK_CALLS:
            return answered_s[BACK_CALLS - 1] - healed_s
        await asyncio.sleep(0.1)
    return None


def _out_s(sign: Sign, stats: dict[str, Any], outcome: dict[str, Any], presence: Presence) -> float | None:
    """The time from the load's begin until the engine is out."""
    if sign is Sign.SLOW_CALLS:
        return None if outcome["abandoned"] else presence.unhurt_after_s(outcome["hurt_s"])
    arrived_s = {Sign.CALLS: "arrivals_s", Sign.CONNECTIONS: "accepted_s"}
    return presence.out_after_s(stats[arrived_s[sign]]) if sign in arrived_s else None


def engines_command(fleet: Sequence[ScriptedEngine]) -> list[str]:
    """The command of one process with these engines, each with its models."""
    command = [sys.executable, "-m", "e2e.faults.scripted_engine", "--first-s", str(FIRST_S), "--token-s", str(TOKEN_S)]
    for engine in fleet:
        command += ["--name", engine.name, "--model", ",".join(engine.models)]
        command += ["--port", str(engine.port), "--control-port", str(engine.control_port)]
    return command


async def until_engine(engine: ScriptedEngine) -> None:
    """Until it answers. Raises `RuntimeError` after some ten seconds."""
    for _ in range(200):
        with suppress(msgspec.DecodeError):
            await engine.stats()
            return
        await asyncio.sleep(0.05)
    raise RuntimeError("the engines do not start")


async def until_ready(port: int, log: Path, engines: int) -> None:
    """Until several calls in a row get good answers, so that all engines are known."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Ready?"}], "max_tokens": 2}
    good, ends_s = 0, time.monotonic() + READY_S
    async with Client(port, 5.0) as client:
        while good < 2 * engines:
            if time.monotonic() > ends_s:
                said = await asyncio.to_thread(log.read_text)
                raise RuntimeError(f"the gateway does not get ready:\n{said[-2000:]}")
            good = good + 1 if is_good(body, await client.post(CHAT, body)) else 0
            await asyncio.sleep(0.1)
