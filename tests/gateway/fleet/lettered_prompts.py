"""A router and what it is told, in short: a prompt is a word, and each letter of it is a tree block."""

from __future__ import annotations

from plait.backends.protocol.cache_state import CacheState, KvState, StoredRun
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.placement.policies import Policy
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.types import Call

# 10 ms a pass and 1 ms a new token; attention is free.
COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())


def new_router(*engines: str, policy: str | Policy = "e2", kv_tokens: int | None = None) -> Router:
    """All engines up and serving model m."""
    router = Router(policy)
    for engine in engines:
        router.add_engine(engine, COSTS, kv_tokens=kv_tokens)
        router.health.answered(engine, {"m": None})
    return router


def hashes(text: str, model: str = "m") -> list[int]:
    """A tree block for each letter."""
    return list(chain([ord(letter) for letter in text], 1, root_hash(model)))


def call(text: str, model: str = "m") -> Call:
    """A prompt of a tree block for each letter and one token more."""
    return Call(f"call-{text}", model, 64 * len(text) + 1, 64, hashes(text, model))


def report(
    *stored: str, removed: str = "", epoch: str = "1", snapshot: bool = False, free: int = 100, granularity: int = 64
) -> CacheState:
    """Prefixes that are stored whole, and one whose last block is gone; `free` blocks of 16 tokens."""
    return CacheState(
        kind="embedded",
        engine="e",
        epoch=epoch,
        cursor=7,
        model="m",
        block_tokens=16,
        granularity_tokens=granularity,
        snapshot=snapshot,
        stored=[StoredRun(None, hashes(text)) for text in stored],
        removed=hashes(removed)[-1:],
        kv=KvState(1_000, free, 0),
    )


def cached(router: Router, text: str, engine: str = "a") -> int:
    """Tree blocks of a prompt that the engine is expected to have."""
    return router.engines[engine].view.residency.cached_blocks(router.tree.match(hashes(text)))
