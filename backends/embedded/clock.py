"""The embedded engine in real time: sleeps while the emulated accelerator computes, then hands out the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from plait.backends.embedded.call import EmbeddedCall, Output
from plait.backends.embedded.engine import Engine
from plait.backends.protocol.cache_state import CacheState

OnOutput = Callable[[Output], None]

MAX_LAG_S = 1.0
"""How many emulated seconds the process may lag behind its accelerator. A longer lag delays the iterations."""


class EngineClock:
    """Drives one engine core. `time_scale` emulated seconds pass in a real second.

    An iteration begins when the last one ended, as on a busy accelerator, even if this process wakes up late. The
    emulated times are then still right; only the tokens come late.
    """

    def __init__(self, engine: Engine, time_scale: float = 1.0) -> None:
        if time_scale <= 0:
            raise ValueError(f"the time scale must be above 0, not {time_scale}")
        self.engine = engine
        self._time_scale = time_scale
        self._loop = asyncio.get_running_loop()
        self._zero = self._loop.time()
        self._listeners: dict[EmbeddedCall, OnOutput] = {}
        self._added = asyncio.Event()
        self._changed = asyncio.Event()
        self._cursor = engine.journal.cursor
        self._task = self._loop.create_task(self._run(), name="engine-clock")

    def now_s(self) -> float:
        return (self._loop.time() - self._zero) * self._time_scale

    def _real_s(self, when_s: float) -> float:
        return self._zero + when_s / self._time_scale

    def add(self, call: EmbeddedCall, on_output: OnOutput) -> None:
        """Queue a call; `on_output` is called for each of its tokens."""
        self._listeners[call] = on_output
        self.engine.add(call)
        self._added.set()
        self._tell()

    def end(self, call: EmbeddedCall) -> None:
        """End a call at a stop string. Its blocks are free at once."""
        if self._listeners.pop(call, None) is not None:
            self.engine.remove(call)
            self._tell()

    def abort(self, call: EmbeddedCall) -> None:
        """Abort a call whose client has gone. No effect on a call that has ended."""
        if self._listeners.pop(call, None) is not None:
            self.engine.abort(call)
            self._tell()

    async def cache_state(
        self, since: int | None, epoch: str | None, wait_s: float, gateway: str | None = None
    ) -> CacheState:
        """The report since a cursor of `epoch`, without the calls of the `gateway` that asks.

        Waits up to `wait_s` real seconds for a change.
        """
        if epoch is not None and epoch != self.engine.epoch:
            since = None
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while since is not None and not self.engine.has_news(since, gateway):
                    await self._changed.wait()
        return self.engine.cache_state(since, gateway)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        ends_s: float | None = None
        while True:
            if self.engine.idle:
                with suppress(TimeoutError):  # the next load has ended
                    async with asyncio.timeout_at(None if ends_s is None else self._real_s(ends_s)):
                        await self._added.wait()
                self._added.clear()  # only after the wait: a call may be added before this task first runs
                now_s = self.now_s()
            elif ends_s is not None:
                await asyncio.sleep(max(0.0, (ends_s - self.now_s()) / self._time_scale))
                now_s = max(ends_s, self.now_s() - MAX_LAG_S)
            step = self.engine.step(now_s)
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
        if self.engine.journal.cursor != self._cursor:
            self._cursor = self.engine.journal.cursor
            self._changed.set()
            self._changed = asyncio.Event()  # later requests wait for the next change
