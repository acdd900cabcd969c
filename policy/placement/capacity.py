"""What is left of an engine's throughput while it holds a latency call to its time per token (Parrot, section 5.4).

Parrot's example is an engine whose capacity falls from 64,000 tokens of throughput work to 2,000. How far it falls is a
matter of the engine, so here it follows from its cost model.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from plait.policy.cost_model import CostModel

CALL_TOKENS = 1366
"""KV cache of a call of which nothing is known: mean prompt (1,155) and output (211) of Azure's conversation trace."""

LEAST_RATIO = 2_000 / 64_000
"""The share that is left in the paper's example. It bounds ours where not even one call decodes within its TPOT."""


def decode_iteration_s(costs: CostModel, calls: int, context_tokens: int) -> float:
    """Seconds of an iteration in which `calls` calls, each behind `context_tokens`, decode a token; O(1)."""
    if calls <= 0:
        return 0.0
    as_one = ((1, calls * (context_tokens + 1) - 1),)  # all of their attention
    return costs.iteration_time_s(as_one) + (costs.forward(calls) - costs.forward(1)) / costs.efficiency


@lru_cache(maxsize=256)
def capacity_ratio(costs: CostModel, tpot_s: float, kv_tokens: int | None) -> float:
    """The share of its throughput that an engine keeps while each of its iterations takes `tpot_s` at most.

    That is the decode rate, in tokens a second, of the largest batch that keeps `tpot_s`, over the rate of the batch
    that fills the KV cache of `kv_tokens` (None: not known, a batch of the pivot's size). From `LEAST_RATIO` to 1.
    """
    pivot = costs.pivot()
    if kv_tokens is not None:
        full = max(1, kv_tokens // CALL_TOKENS)
    elif pivot is not None:
        full = pivot.tokens
    else:
        return 1.0  # an iteration takes as long whatever is in it

    def iteration_s(calls: int) -> float:
        return decode_iteration_s(costs, calls, CALL_TOKENS)

    kept = bisect_right(range(1, full + 1), tpot_s, key=iteration_s)
    if kept == 0:
        return LEAST_RATIO
    ratio = kept / iteration_s(kept) * iteration_s(full) / full if kept < full else 1.0
    return min(1.0, max(LEAST_RATIO, ratio))
