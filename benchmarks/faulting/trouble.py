"""Troubles the engines of a fleet in random order: kills them, stops them, makes them misbehave, and ends all of it."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.faulting.measurement import until_engine
from e2e.faults.fleet import ScriptedEngine
from e2e.faults.modes import MODES

_CHANGES_TEXT: Final = {"stream_not_utf8", "stream_nul", "stream_json_cut"}
MODE_NAMES: Final = [mode.name for mode in MODES.values() if mode.name not in _CHANGES_TEXT and not mode.asks_key]
"""Those that leave a good answer's text as it is."""

PAUSE_S: Final = (1.0, 5.0)
TROUBLE_S: Final = (1.0, 15.0)
SHARES: Final = (0.1, 0.5, 1.0)


class TroubledEngine:
    """An engine as a process of its own, which can be killed and stopped."""

    def __init__(self, engine: ScriptedEngine, command: Sequence[str], log: Path) -> None:
        self.engine = engine
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process."""
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)  # noqa: S603

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill the process, also a stopped one."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Trouble:
    """Troubles at most half of the engines at a time. `counts` has what was done how often."""

    def __init__(self, engines: Sequence[TroubledEngine], dice: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._well = list(engines)
        self._most = len(engines) // 2
        self._dice = dice
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Make trouble until cancelled; then wait until all engines are well."""
        try:
            while True:
                await asyncio.sleep(self._dice.uniform(*PAUSE_S))
                if len(self._tasks) < self._most:
                    engine = self._well.pop(self._dice.randrange(len(self._well)))
                    task = asyncio.create_task(self._trouble(engine))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            await asyncio.gather(*self._tasks)

    async def _trouble(self, engine: TroubledEngine) -> None:
        ways: list[Callable[[TroubledEngine, float], Awaitable[None]]] = [self._kill, self._stop, self._misbehave]
        way = self._dice.choices(ways, weights=(1, 1, 3))[0]
        try:
            await way(engine, self._dice.uniform(*TROUBLE_S))
        finally:
            self._well.append(engine)

    async def _kill(self, engine: TroubledEngine, time_s: float) -> None:
        self.counts["killed"] += 1
        engine.end()
        await asyncio.sleep(time_s)
        engine.start()
        await until_engine(engine.engine)  # else the next mode could come before it listens

    async def _stop(self, engine: TroubledEngine, time_s: float) -> None:
        self.counts["stopped"] += 1
        engine.send(signal.SIGSTOP)
        await asyncio.sleep(time_s)
        engine.send(signal.SIGCONT)

    async def _misbehave(self, engine: TroubledEngine, time_s: float) -> None:
        self.counts["misbehaved"] += 1
        mode, share = self._dice.choice(MODE_NAMES), self._dice.choice(SHARES)
        await engine.engine.set_mode(mode, share=share, seed=self._dice.randrange(2**32))
        await asyncio.sleep(time_s)
        await engine.engine.heal()
