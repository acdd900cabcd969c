"""SGLang's KV cache events, read by the observer of its cache and still there for a publisher of SGLang's own."""

from __future__ import annotations

from typing import Any

from plait.backends.sglang.cache_state import CacheObserver


class EventTap:
    """Stands before `take_events` of one tree cache; `published` says whether SGLang takes them too."""

    def __init__(self, tree_cache: Any, observer: CacheObserver, *, published: bool) -> None:
        self._take = tree_cache.take_events
        self._observer = observer
        self._published = published
        self._kept: list[Any] = []
        tree_cache.take_events = self._take_kept

    def drain(self) -> None:
        """Show the observer what has happened."""
        events = self._take()
        if events:
            self._observer.observe(events)
            if self._published:
                self._kept += events

    def _take_kept(self) -> list[Any]:
        self.drain()
        events, self._kept = self._kept, []
        return events
