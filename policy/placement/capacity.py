"""The share of its throughput that an engine keeps while it meets a latency call's TPOT (Parrot, section 5.4).

In Parrot's example, an engine's capacity falls from 64,000 tokens of throughput work to 2,000. The fall depends on the
engine, so it is computed from the engine's cost model.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from plait.policy.cost_model import CostModel

CALL_TOKENS = 1366
"""Assumed KV tokens of an unknown call: mean prompt (1,155) plus mean output (211) of Azure's conversation trace."""

LEAST_RATIO = 2_000 / 64_000
"""Ours: the lower bound, also if not even one call meets the TPOT. It is the share in the paper's example."""


def decode_iteration_s(costs: CostModel, calls: int, context_tokens: int) -> float:
    """Seconds of an iteration in which `calls` calls each decode a token after `context_tokens`; O(1)."""
    if calls <= 0:
        return 0.0
    as_one = ((1, calls * (context_tokens + 1) - 1),)  # one decode whose context is as long as all contexts together
    return costs.iteration_time_s(as_one) + (costs.forward(calls) - costs.forward(1)) / costs.efficiency


@lru_cache(maxsize=256)
def capacity_ratio(costs: CostModel, tpot_s: float, kv_tokens: int | None) -> float:
    """The share of its throughput that an engine keeps if each iteration takes at most `tpot_s`: `LEAST_RATIO` to 1.

    It is the decode rate of the largest batch that meets `tpot_s`, divided by the decode rate of a full batch. A full
    batch fills the KV cache. If `kv_tokens` is None (not known), it has the pivot's size.
    """
    pivot = costs.pivot()
    if kv_tokens is not None:
        full = max(1, kv_tokens // CALL_TOKENS)
    elif pivot is not None:
        full = pivot.tokens
    else:
        return 1.0  # every iteration takes the same time

    def iteration_s(calls: int) -> float:
        return decode_iteration_s(costs, calls, CALL_TOKENS)

    kept = bisect_right(range(1, full + 1), tpot_s, key=iteration_s)
    if kept == 0:
        return LEAST_RATIO
    ratio = kept / iteration_s(kept) * iteration_s(full) / full if kept < full else 1.0
    return min(1.0, max(LEAST_RATIO, ratio))
