"""The engines whose queue is long enough: a further call for one of them waits in the gateway instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.served_models import ServedModels
from plait.policy.placement.engine_view import EngineView


class FullEngines:
    """Engines in which a new call would wait `backlog_s` or longer (infinite: no engine is ever full)."""

    def __init__(self, engines: Mapping[str, FleetEngine], models: ServedModels, backlog_s: float = inf) -> None:
        self._engines = engines
        self._models = models
        self._backlog_s = backlog_s
        self._full: set[str] = set()

    def note(self, engine: FleetEngine, now_s: float) -> None:
        """An engine's queue has changed."""
        if self._backlog_s == inf:
            return
        if engine.view.queue.wait_s(now_s) >= self._backlog_s:
            self._full.add(engine.view.engine_id)
        else:
            self._full.discard(engine.view.engine_id)

    def with_room(self, engines: Sequence[EngineView]) -> Sequence[EngineView]:
        """Those of `engines` that are not full; all if all are."""
        if not self._full:
            return engines
        return [engine for engine in engines if engine.engine_id not in self._full] or engines

    def has_room(self, model: str, now_s: float) -> bool:
        """Whether a call for `model` should be placed now: an engine is not full, or none takes calls at all."""
        if not self._full:
            return True
        engines = self._models.able(model)
        for engine_id in [engine.engine_id for engine in engines if engine.engine_id in self._full]:
            self.note(self._engines[engine_id], now_s)
        return not engines or any(engine.engine_id not in self._full for engine in engines)
