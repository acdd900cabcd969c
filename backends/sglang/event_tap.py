"""Shows SGLang's KV cache events to the observer, keeps them for SGLang's own publisher, and tells of the changes."""

from __future__ import annotations

from typing import Any

from plait.backends.sglang.cache_state import CacheObserver
from plait.backends.sglang.news import NewsSender, Report


class EventTap:
    """Wraps one tree cache's `take_events`. `published` says whether SGLang publishes the events too.

    `news` goes to the API server.
    """

    def __init__(
        self, tree_cache: Any, observer: CacheObserver, *, published: bool, news: NewsSender | None = None
    ) -> None:
        self._take = tree_cache.take_events
        self._observer = observer
        self._published = published
        self._news = news
        self._kept: list[Any] = []
        self._leads = False
        tree_cache.take_events = self._take_kept

    def drain(self) -> None:
        """Show the new events to the observer."""
        events = self._take()
        if events:
            self._observer.observe(events)
            if self._published:
                self._kept += events

    def tell(self, report: Report) -> None:
        """Tell the API server what `report` says, if blocks have changed. Called on the leading rank between steps."""
        self._leads = True
        self.drain()
        if self._news is not None:
            self._news.tell(self._observer.journal.cursor, report)

    def tell_again(self, report: Report) -> None:
        """Tell it amid a step. Called on every rank: the others tell nothing."""
        if self._leads:
            self.tell(report)

    def _take_kept(self) -> list[Any]:
        self.drain()
        events, self._kept = self._kept, []
        return events
