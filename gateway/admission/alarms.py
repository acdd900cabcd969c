"""When engines are looked at: as soon as something has happened that may make room, and when time itself makes room."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from plait.gateway.timer import At

LEAST_PAUSE_S = 0.005
"""Before an engine is looked at again although nothing has happened."""

Look = Callable[[str, float], None]


class Alarms:
    """Calls `look` with an engine and the time. `at` schedules it."""

    def __init__(self, at: At, look: Look) -> None:
        self._at = at
        self._look = look
        self._news: dict[str, None] = {}
        self._due: dict[str, float] = {}

    def now(self, engine_id: str) -> None:
        """Look at an engine once the event that goes on is over."""
        self.all([engine_id])

    def all(self, engine_ids: Iterable[str]) -> None:
        """Look at these engines once the event that goes on is over."""
        is_new = not self._news
        self._news.update(dict.fromkeys(engine_ids))
        if is_new and self._news:
            self._at(0.0, self._look_at_news)

    def by(self, engine_id: str, when_s: float, now_s: float) -> None:
        """Look at an engine at a time at the latest; infinite: not for this."""
        when_s = max(when_s, now_s + LEAST_PAUSE_S)
        if when_s < self._due.get(engine_id, inf):
            self._due[engine_id] = when_s
            self._at(when_s, lambda at_s: self._is_due(engine_id, at_s))

    def _look_at_news(self, now_s: float) -> None:
        engines, self._news = self._news, {}
        for engine_id in engines:
            self._look(engine_id, now_s)

    def _is_due(self, engine_id: str, now_s: float) -> None:
        if self._due.get(engine_id, inf) <= now_s:
            del self._due[engine_id]
            self._look(engine_id, now_s)
