"""Host memory as a tier of SGLang's cache (HiCache): its size, and the tokens and times of loads from it."""

from __future__ import annotations

from typing import Any

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.tier_journal import TierJournal


def host_tier(tree_cache: Any, journal: CacheJournal, page_tokens: int) -> TierJournal | None:
    """The tier whose tree blocks are in `journal`; None if the tree cache keeps none in host memory.

    Host memory may also be only a buffer on the way to a storage backend.
    """
    pool = getattr(getattr(tree_cache, "cache_controller", None), "mem_pool_host", None)
    if pool is None or getattr(tree_cache, "host_memory_mode", "cache") != "cache":
        return None
    tier = TierJournal("host", journal, int(getattr(pool, "size", 0)) // page_tokens)
    collector = getattr(tree_cache, "metrics_collector", None)
    if hasattr(collector, "increment_load_back_num_bytes"):  # versions without it measure the call, not the transfer
        _Loads(collector, tier)
    return tier


class _Loads:
    """Reads what SGLang reports to its metrics: the tokens of each load, then its time if the device measures it."""

    def __init__(self, collector: Any, tier: TierJournal) -> None:
        self._tier = tier
        self._untimed_tokens = 0
        self._count, self._observe = collector.increment_load_back_num_tokens, collector.observe_load_back_duration
        collector.increment_load_back_num_tokens = self._loaded
        collector.observe_load_back_duration = self._took

    def _loaded(self, num_tokens: int, pool: str = "kv") -> None:
        self._count(num_tokens=num_tokens, pool=pool)
        if pool == "kv":
            self._untimed_tokens += num_tokens

    def _took(self, duration_seconds: float) -> None:
        self._observe(duration_seconds)
        self._tier.loaded_tokens += self._untimed_tokens
        self._tier.loading_s += duration_seconds
        self._untimed_tokens = 0
