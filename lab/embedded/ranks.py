"""The data-parallel ranks of a server, and its own choice among them for calls that name none: as vLLM 0.32 chooses."""

from __future__ import annotations

from collections.abc import Sequence

from plait.lab.embedded.engine import Engine

USAGE_WEIGHT, USAGE_START = 6.0, 0.5
"""Where more than half of the KV is in use, vLLM counts a waiting call up to three times more."""


class Ranks:
    """A server's engines. A call goes to the one with the fewest calls, ties in turn; no prefix plays a part.

    vLLM's is `DPLBAsyncMPClient.get_core_engine_for_request`. There, ends of calls count up to 100 ms late.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._first = 0

    def choose(self) -> int:
        """The rank for a call."""
        turns = (turn % len(self.engines) for turn in range(self._first, self._first + len(self.engines)))
        self._first = (self._first + 1) % len(self.engines)
        return min(turns, key=self._calls)

    def _calls(self, rank: int) -> float:
        engine = self.engines[rank]
        usage = 1 - engine.facts.free_blocks * engine.settings.block_tokens / engine.settings.kv_tokens
        waiting = len(engine.waiting)
        return len(engine.running) + waiting + waiting * USAGE_WEIGHT * max(0.0, usage - USAGE_START)
