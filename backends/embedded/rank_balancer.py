"""A server's own choice among its data-parallel ranks, for calls that name none: as vLLM 0.32 chooses.

vLLM's is `DPLBAsyncMPClient.get_core_engine_for_request`. No prefix plays a part in the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from plait.backends.embedded.engine import Engine

COUNTED_S = 0.1
"""vLLM's coordinator tells the API server the ranks' counts every 100 ms."""
USAGE_WEIGHT = 6.0
USAGE_START = 0.5
"""vLLM counts each waiting call of a rank up to three times more when more than half of the rank's KV is in use."""


class RankBalancer:
    """Chooses the rank with the fewest calls, ties in turn, by counts that are up to `COUNTED_S` old.

    As in vLLM, the calls that the server itself has sent to a rank and not finished are known at once.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._first = 0
        self._counted_s = -inf
        self._waiting: list[int] = []
        self._running: list[int] = []
        self._usage: list[float] = []

    def choose(self, now_s: float) -> int:
        """The rank for a call that the caller adds to its engine at once."""
        if now_s >= self._counted_s + COUNTED_S:
            self._count(now_s)
        ranks = len(self.engines)
        chosen = min(((self._first + turn) % ranks for turn in range(ranks)), key=self._score)
        self._waiting[chosen] += 1
        self._first = (self._first + 1) % ranks
        return chosen

    def _count(self, now_s: float) -> None:
        self._counted_s = now_s
        self._waiting = [len(engine.waiting) for engine in self.engines]
        self._running = [len(engine.running) for engine in self.engines]
        self._usage = [engine.kv_usage for engine in self.engines]

    def _score(self, rank: int) -> float:
        engine, waiting = self.engines[rank], self._waiting[rank]
        unfinished = len(engine.waiting) + len(engine.running)
        calls = max(unfinished, waiting + self._running[rank])
        return calls + waiting * USAGE_WEIGHT * max(0.0, self._usage[rank] - USAGE_START)
