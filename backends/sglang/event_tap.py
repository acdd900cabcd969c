"""Shows SGLang's KV cache events to the observer, and keeps them for SGLang's own publisher."""

from __future__ import annotations

from typing import Any

from plait.backends.sglang.cache_state import CacheObserver


class EventTap:
    """Wraps one tree cache's `take_events`. `published` says whether SGLang publishes the events too."""

    def __init__(self, tree_cache: Any, observer: CacheObserver, *, published: bool) -> None:
        self._take = tree_cache.take_events
        self._observer = observer
        self._published = published
        self._kept: list[Any] = []
        tree_cache.take_events = self._take_kept

    def drain(self) -> None:
        """Show the new events to the observer."""
        events = self._take()
        if events:
            self._observer.observe(events)
            if self._published:
                self._kept += events

    def _take_kept(self) -> list[Any]:
        self.drain()
        events, self._kept = self._kept, []
        return events
