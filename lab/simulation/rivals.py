"""The placement policies of other gateways, with which `plait demo --compare` compares.

Each is written from its gateway's public documentation and source. All see what Plait's policy sees: the reported
caches, and the calls of each engine. Least outstanding calls is in `policy/placement/policies.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final
from zlib import crc32

from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Situation, cached_prefix, placed
from plait.policy.placement.policies import POLICIES, Policy, by_name
from plait.policy.types import Call, Placement, PlacementReason

SMG_GAP, SMG_RATIO = 64, 1.5
"""SMG ignores caches while the engine with the most calls has over `SMG_GAP` more than the one with the fewest, and
over `SMG_RATIO` times as many.
"""
LLMD_WEIGHTS: Final = (3.0, 2.0, 2.0)
"""llm-d's default profile: weights of prefix, queue and KV cache."""

Cached = dict[EngineView, int]
"""The blocks of a prompt that each engine has."""


def session_hash(call: Call, situation: Situation) -> Placement:
    """The same engine for the same session, or without one, for the same first block of the prompt.

    A load balancer that hashes a header does the same.
    """
    return place(call, in_own_order(call, situation)[0], cached_blocks(call, situation))


def smg(call: Call, situation: Situation) -> Placement:
    """The cache-aware policy of sglang-router, now SMG, with its default thresholds and with cache events.

    The engine with the longest prefix, and among equal ones the least loaded; by load alone while out of balance.
    """
    cached, engines = cached_blocks(call, situation), in_turn(situation)
    loads = [engine.outstanding for engine in engines]
    if max(loads) - min(loads) > SMG_GAP and max(loads) > SMG_RATIO * min(loads):
        return place(call, min(engines, key=lambda one: one.outstanding), cached)
    return place(call, min(engines, key=lambda one: (-cached[one], one.outstanding)), cached)


def llmd(call: Call, situation: Situation) -> Placement:
    """llm-d's default profile: the best weighted sum of three scores between 0 and 1: the cached share of the prompt,
    the waiting calls, and the KV cache in use.
    """
    cached, engines = cached_blocks(call, situation), in_turn(situation)
    queued, contexts = _scores(engines, lambda one: len(one.queue)), _scores(engines, lambda one: one.context_tokens)

    def score(engine: EngineView) -> float:
        prefix = cached[engine] * call.block_tokens / max(1, call.prompt_tokens)
        scores = (prefix, queued[engine], contexts[engine])
        return sum(weight * score for weight, score in zip(LLMD_WEIGHTS, scores, strict=True))

    return place(call, max(engines, key=score), cached)


RIVALS: Final = by_name(
    Policy("session_hash", "session hash", session_hash),
    Policy("smg", "sglang-router (cache aware)", smg),
    Policy("llmd", "llm-d (score)", llmd),
)
KNOWN: Final = {**POLICIES, **RIVALS}


def in_turn(situation: Situation) -> list[EngineView]:
    """The engines, rotated by one from call to call, so that the first does not win all ties."""
    first = situation.turn % len(situation.engines)
    return [*situation.engines[first:], *situation.engines[:first]]


def in_own_order(call: Call, situation: Situation) -> list[EngineView]:
    """The engines by rendezvous hashing of the call's session, or without one, of its prompt's first block."""
    first = call.block_hashes[0] if len(call.block_hashes) else 0
    key = call.session or first
    return sorted(situation.engines, key=lambda one: crc32(f"{key} {one.engine_id}".encode()))


def cached_blocks(call: Call, situation: Situation) -> Cached:
    return {engine: cached_prefix(call, situation, engine) for engine in situation.engines}


def place(call: Call, engine: EngineView, cached: Cached) -> Placement:
    exploits = 2 * cached[engine] * call.block_tokens > call.prompt_tokens
    return placed(call, engine, PlacementReason.EXPLOIT if exploits else PlacementReason.EXPLORE, cached[engine])


def _scores(engines: Collection[EngineView], load: Callable[[EngineView], float]) -> dict[EngineView, float]:
    """1 for the least loaded engine, 0 for the most loaded one."""
    loads: Sequence[float] = [load(engine) for engine in engines]
    least, most = min(loads), max(loads)
    return {
        engine: 1.0 if most == least else (most - one) / (most - least)
        for engine, one in zip(engines, loads, strict=True)
    }
