"""The embedded engine in real time: sleeps while the emulated accelerator computes, then hands out the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from plait.backends.protocol.cache_state import CacheState
from plait.lab.embedded.call import EmbeddedCall, Output
from plait.lab.embedded.engine import Engine
from plait.lab.embedded.lockstep import Lockstep

OnOutput = Callable[[Output], None]

MAX_LAG_S = 1.0
"""How many emulated seconds the process may lag behind its accelerator. A longer lag delays the iterations."""


class EngineClock:
    """Drives one engine core, or several in lockstep. `time_scale` emulated seconds pass in a real second.

    An iteration begins when the last one ended, as on a busy accelerator, even if this process wakes up late. The
    emulated times are then still right; only the tokens come late.
    """

    def __init__(self, engines: Sequence[Engine], time_scale: float = 1.0) -> None:
        if time_scale <= 0:
            raise ValueError(f"the time scale must be above 0, not {time_scale}")
        self._engines = engines
        self._steps = engines[0] if len(engines) == 1 else Lockstep(engines)
        self._time_scale = time_scale
        self._loop = asyncio.get_running_loop()
        self._zero = self._loop.time()
        self._listeners: dict[EmbeddedCall, OnOutput] = {}
        self._added = asyncio.Event()
        self._changed = asyncio.Event()
        self._cursor = self._changes()
        self._task = self._loop.create_task(self._run(), name="engine-clock")

    def now_s(self) -> float:
        return (self._loop.time() - self._zero) * self._time_scale

    def _real_s(self, when_s: float) -> float:
        return self._zero + when_s / self._time_scale

    def add(self, engine: Engine, call: EmbeddedCall, on_output: OnOutput) -> None:
        """Queue a call of one of the engines; `on_output` is called for each of its tokens."""
        self._listeners[call] = on_output
        engine.add(call)
        self._added.set()
        self._tell()

    def end(self, engine: Engine, call: EmbeddedCall) -> None:
        """End a call at a stop string. Its blocks are free at once."""
        if self._listeners.pop(call, None) is not None:
            engine.remove(call)
            self._tell()

    def abort(self, engine: Engine, call: EmbeddedCall) -> None:
        """Abort a call whose client has gone. No effect on a call that has ended."""
        if self._listeners.pop(call, None) is not None:
            engine.abort(call)
            self._tell()

    async def cache_state(
        self, engine: Engine, since: int | None, epoch: str | None, wait_s: float, gateway: str | None = None
    ) -> CacheState:
        """The report of an engine since a cursor of `epoch`, without the calls of the `gateway` that asks.

        Waits up to `wait_s` real seconds for a change.
        """
        if epoch is not None and epoch != engine.epoch:
            since = None
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while since is not None and not engine.has_news(since, gateway):
                    await self._changed.wait()
        return engine.cache_state(since, gateway)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        ends_s: float | None = None
        while True:
            if self._steps.idle:
                with suppress(TimeoutError):  # the next load has ended
                    async with asyncio.timeout_at(None if ends_s is None else self._real_s(ends_s)):
                        await self._added.wait()
                self._added.clear()  # only after the wait: a call may be added before this task first runs
                now_s = self.now_s()
            elif ends_s is not None:
                await asyncio.sleep(max(0.0, (ends_s - self.now_s()) / self._time_scale))
                now_s = max(ends_s, self.now_s() - MAX_LAG_S)
            step = self._steps.step(now_s)
            ends_s = step.ends_s
            for output in step.outputs:
                listener = self._listeners.get(output.call)
                if listener is not None:
                    if output.finished:
                        del self._listeners[output.call]
                    listener(output)
            self._tell()

    def _tell(self) -> None:
        """Wake the requests that wait for a report if there is a change."""
        changes = self._changes()
        if changes != self._cursor:
            self._cursor = changes
            self._changed.set()
            self._changed = asyncio.Event()  # later requests wait for the next change

    def _changes(self) -> int:
        return sum([engine.journal.cursor for engine in self._engines])
