"""Says which engine may be sent a further line: it asks the fleet for the spare room."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

from plait.gateway.admission.admission import Admission
from plait.gateway.fleet.router import Router
from plait.policy.admission.spare_room import SpareRoom
from plait.policy.costs.engine_view import EngineView

LOOK_S: Final = 0.05
"""Between two looks at the fleet, while no line ends."""


class SentLine(NamedTuple):
    """A line on an engine, and what it needs there."""

    engine: str
    room: SpareRoom
    needed: float


class Feeder:
    """Knows the room of each engine."""

    def __init__(self, router: Router, admission: Admission) -> None:
        self._rooms: dict[str, SpareRoom] = {}  # by engine
        self._router = router
        self._admission = admission
        self._changed = asyncio.Event()
        self._alone: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._suspects: Counter[str] = Counter()  # by model: the lines that run alone, or wait for that
        self._kept: dict[str, str] = {}  # by model: the engine where they run, which gets no other line

    def engines(self, model: str) -> list[str]:
        """The engines that serve a model now."""
        return [view.engine_id for view in self._takers(model)]

    def engine_for(self, model: str, tokens: Callable[[str], float | None], now_s: float) -> str | None:
        """The engine with the fewest calls that may be sent a line now; None: no engine may.

        `tokens` tells how many new tokens the next line of an engine has; None: there is none.
        """
        if self._admission.waiting(self._router.models.target(model)):
            return None
        for view in self._free(model):
            kv_tokens = self._router.engines[view.engine_id].cache.likely_tokens
            if (count := tokens(view.engine_id)) is not None and self._room(view).has(count, kv_tokens, now_s):
                return view.engine_id
        return None

    @asynccontextmanager
    async def alone(self, model: str, avoid: str, is_over: Callable[[], bool]) -> AsyncIterator[str | None]:
        """Wait for an engine where no line runs, and keep lines away from it; None: the batch was over before.

        The engine is another one than `avoid` if there is one. One line of a model runs alone at a time; those that
        wait have the engine next, without other lines between them.
        """
        self._suspects[model] += 1
        try:
            async with self._alone[model]:
                while not is_over():
                    engine = self._kept_for(model, avoid)
                    if engine is not None and not self._lines(engine):
                        break
                    await self.change()
                yield None if is_over() else engine
        finally:
            self._suspects[model] -= 1
            if not self._suspects[model]:
                self._kept.pop(model, None)
                self.wake()

    def _kept_for(self, model: str, avoid: str) -> str | None:
        """The engine where the model's lines run alone, which may become another one; None: no engine serves it."""
        takers, kept = self.engines(model), self._kept.pop(model, None)
        if kept not in takers or (kept == avoid and len(takers) > 1):
            free = sorted(self._free(model), key=lambda view: view.engine_id == avoid)
            kept = free[0].engine_id if free else None
        if kept is not None:
            self._kept[model] = kept
        return kept

    def _lines(self, engine: str) -> int:
        room = self._rooms.get(engine)
        return 0 if room is None else room.lines

    def _free(self, model: str) -> list[EngineView]:
        """The engines that lines may be sent to, those with the fewest calls first."""
        free = (view for view in self._takers(model) if view.engine_id not in self._kept.values())
        return sorted(free, key=lambda view: view.calls)

    def _takers(self, model: str) -> list[EngineView]:
        """The engines that serve a model, which may be named by an alias."""
        return list(self._router.models.takers.get(self._router.models.target(model), ()))

    def sent(self, engine: str, tokens: float, now_s: float) -> SentLine:
        """A line with about so many new tokens was sent. What this returns is for `ended`."""
        room = self._room(self._router.engines[engine].view)
        return SentLine(engine, room, room.sent(tokens, now_s))

    def ended(self, line: SentLine | None) -> None:
        """A line has ended; None: one that was sent as any call."""
        if line is not None:
            line.room.ended(line.needed)
        self.wake()

    def _room(self, view: EngineView) -> SpareRoom:
        room = self._rooms.get(view.engine_id)
        if room is None or room.view is not view:  # another engine of this name
            room = self._rooms[view.engine_id] = SpareRoom(view)
        return room

    def wake(self) -> None:
        """Something has changed for batches."""
        self._changed.set()

    async def change(self, *, looks: bool = True) -> None:
        """Wait for a change, or for the next look, if the caller `looks`."""
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), LOOK_S if looks else None)
