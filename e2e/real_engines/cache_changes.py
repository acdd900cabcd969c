"""What an engine stores and evicts, and when."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from e2e.real_engines.engine import RealEngine

WAIT_MS = 200
"""How long a report is held back while nothing changes."""


class CacheChanges:
    """The changes of one engine's cache by tree block: each a pair of times in seconds between which it came."""

    def __init__(self, engine: RealEngine) -> None:
        self._engine = engine
        self._changes: dict[int, list[tuple[float, float]]] = defaultdict(list)

    def follow(self, ended: Event) -> None:
        """Ask for reports until `ended` is set."""
        state, before_s = self._engine.cache_state(), time.monotonic()
        while not ended.is_set():
            state = self._engine.cache_state(since=state.cursor, epoch=state.epoch, wait_ms=WAIT_MS)
            now_s = time.monotonic()
            for block in (*state.removed, *(block for run in state.stored for block in run.hashes)):
                self._changes[block].append((before_s, now_s))
            before_s = now_s

    def has(self, block: int, since_s: float, until_s: float) -> bool:
        """Whether the engine may have stored or evicted a tree block between two times."""
        return any(begin_s <= until_s and end_s >= since_s for begin_s, end_s in self._changes[block])


@contextmanager
def following(engines: Mapping[str, RealEngine]) -> Iterator[Mapping[str, CacheChanges]]:
    """Follow the caches of engines by name."""
    found, ended = {name: CacheChanges(engine) for name, engine in engines.items()}, Event()
    with ThreadPoolExecutor(len(found)) as pool:
        followed = [pool.submit(one.follow, ended) for one in found.values()]
        try:
            yield found
        finally:
            ended.set()
    for one in followed:
        one.result()
