"""Follows the health of a gateway's engines in its metrics."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from e2e.faults.raw_client import Client
from tests.waiting import WITHIN_S

POLL_S = 0.2
USUAL = frozenset(("up", "suspect"))
TAKES_CALLS = USUAL | {"probation"}

_SAMPLE = re.compile(r"^(\w+)\{([^}]*)\} ([0-9.e+-]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Watch:
    """As a context: the states of each engine, with the time since when each was seen, and its outstanding calls.

    A gateway without `plait_engine_health` has the states `up` and `down`.
    """

    def __init__(self, port: int) -> None:
        self.states: dict[str, list[tuple[float, str]]] = defaultdict(list)
        self.outstanding: dict[str, float] = {}
        self.scrapes = 0
        self._client = Client(port)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._client.close()

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Read the metrics once."""
        answer = await self._client.get("/metrics")
        now_s, seen = time.monotonic(), dict[str, str]()
        for name, labels, value in _SAMPLE.findall(answer.body.decode()):
            if name not in {"plait_engine_up", "plait_engine_health", "plait_engine_outstanding_calls"}:
                continue
            fields = dict(_LABEL.findall(labels))
            engine = fields["engine"]
            if name == "plait_engine_outstanding_calls":
                self.outstanding[engine] = float(value)
            elif name == "plait_engine_up":
                seen.setdefault(engine, "up" if float(value) else "down")
            elif float(value):
                seen[engine] = fields["state"]
        for engine, state in seen.items():
            if not self.states[engine] or self.states[engine][-1][1] != state:
                self.states[engine].append((now_s, state))
        self.scrapes += 1

    def state(self, engine: str) -> str:
        """An engine's state now."""
        return self.states[engine][-1][1] if self.states[engine] else "unknown"

    def is_out(self, engine: str) -> bool:
        """Whether the engine gets no calls."""
        return self.state(engine) not in TAKES_CALLS

    def was_out(self, engine: str, since_s: float) -> bool:
        """Whether it got none at some time since then. One on probation was ejected, maybe between two looks."""
        return any(at_s >= since_s and state not in USUAL for at_s, state in self.states[engine])

    async def until(self, holds: Callable[[], bool], deadline_s: float = WITHIN_S) -> float | None:
        """The seconds until it holds; None if that is later than `deadline_s`."""
        began_s = time.monotonic()
        while not holds():
            if time.monotonic() - began_s > deadline_s:
                return None
            await asyncio.sleep(POLL_S / 4)
        return time.monotonic() - began_s
