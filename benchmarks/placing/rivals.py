"""The placement of other gateways, as policies of the router: each from its public documentation and source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final
from zlib import crc32

from benchmarks.placing.baselines import in_turn, lmetric, place
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.situation import Policy, Situation, cached_blocks
from plait.policy.types import Call, Placement

SMG_GAP, SMG_RATIO = 64, 1.5
"""SMG's cache-aware policy goes by load alone while an engine has so many calls more, and so many times as many."""
LLMD_WEIGHTS: Final = (3.0, 2.0, 2.0)
"""llm-d's default profile: prefix, queue, KV cache."""
LLMD_STICKY: Final = (0.99, 0.8)
"""llm-d's latency profile: engines with such a share of the prompt are looked at first, the larger share before."""
LLMD_LATER_S: Final = 5.0
"""They are left if their predicted TTFT is by so much later than the best."""
BOUNDED_LOAD: Final = 1.25

Held = dict[EngineView, int]


def session_hash(call: Call, situation: Situation) -> Placement:
    """Always the same engine for the same beginning of a prompt, which is a session's or a document's own."""
    return place(call, _in_own_order(call, situation)[0], _held(call, situation))


def prefix_hash(call: Call, situation: Situation) -> Placement:
    """The same with bounded load: the next engine in the call's own order while one has too many calls."""
    order = _in_own_order(call, situation)
    most = BOUNDED_LOAD * (1 + sum(one.outstanding for one in order)) / len(order)
    engine = next((one for one in order if one.outstanding + 1 <= most), order[0])
    return place(call, engine, _held(call, situation))


def smg(call: Call, situation: Situation) -> Placement:
    """The longest prefix by cache events, the least loaded of equal ones; by load alone if that is out of balance."""
    held, engines = _held(call, situation), in_turn(situation)
    loads = [engine.outstanding for engine in engines]
    if max(loads) - min(loads) > SMG_GAP and max(loads) > SMG_RATIO * min(loads):
        return place(call, min(engines, key=lambda one: one.outstanding), held)
    return place(call, min(engines, key=lambda one: (-held[one], one.outstanding)), held)


def llmd(call: Call, situation: Situation) -> Placement:
    """The best weighted sum of three scores between 0 and 1."""
    held, engines = _held(call, situation), in_turn(situation)
    queued, contexts = _scores(engines, lambda one: len(one.queue)), _scores(engines, lambda one: one.context_tokens)

    def score(engine: EngineView) -> float:
        prefix = held[engine] * call.block_tokens / max(1, call.prompt_tokens)
        scores = (prefix, queued[engine], contexts[engine])
        return sum(weight * score for weight, score in zip(LLMD_WEIGHTS, scores, strict=True))

    return place(call, max(engines, key=score), held)


def llmd_latency(call: Call, situation: Situation) -> Placement:
    """Sticky while that costs little TTFT, then the least predicted TTFT."""
    held, engines = _held(call, situation), in_turn(situation)
    ttfts_s = {engine: _ttft_s(call, engine, held[engine], situation.now_s) for engine in engines}
    best_s = min(ttfts_s.values())
    for share in LLMD_STICKY:
        sticky = [one for one in engines if held[one] >= share * max(1, call.cacheable_blocks)]
        if sticky and min(ttfts_s[one] for one in sticky) - best_s <= LLMD_LATER_S:
            return place(call, min(sticky, key=ttfts_s.__getitem__), held)
    return place(call, min(engines, key=ttfts_s.__getitem__), held)


def least_ttft(call: Call, situation: Situation) -> Placement:
    """The least predicted TTFT."""
    held, engines = _held(call, situation), in_turn(situation)
    return place(call, min(engines, key=lambda one: _ttft_s(call, one, held[one], situation.now_s)), held)


def dynamo_cost(call: Call, situation: Situation) -> Placement:
    """The least sum of blocks to compute and blocks in use."""
    held, engines = _held(call, situation), in_turn(situation)

    def cost(engine: EngineView) -> float:
        missed_tokens = call.prompt_tokens - held[engine] * call.block_tokens
        return engine.queue.tokens + missed_tokens + engine.context_tokens + call.prompt_tokens

    return place(call, min(engines, key=cost), held)


RIVALS: Final[dict[str, str | Policy]] = {
    "round_robin": "round_robin",
    "least_outstanding": "least_outstanding",
    "session_hash": session_hash,
    "prefix_hash": prefix_hash,
    "smg": smg,
    "llmd": llmd,
    "llmd_latency": llmd_latency,
    "dynamo_cost": dynamo_cost,
    "lmetric": lmetric,
    "e2": "e2",
}
"""All but ours, by name."""


def _held(call: Call, situation: Situation) -> Held:
    return {engine: cached_blocks(call, situation, engine) for engine in situation.engines}


def _in_own_order(call: Call, situation: Situation) -> list[EngineView]:
    """The engines by rendezvous hashing of the prompt's first block."""
    first = call.block_hashes[0] if len(call.block_hashes) else 0
    return sorted(situation.engines, key=lambda one: crc32(f"{first} {one.engine_id}".encode()))


def _ttft_s(call: Call, engine: EngineView, held_blocks: int, now_s: float) -> float:
    """As a learned predictor would give it: by the engine's own cost model."""
    cached_tokens = held_blocks * call.block_tokens
    missed_tokens = call.prompt_tokens - cached_tokens
    own_s = engine.drain_s(missed_tokens) + engine.cost_model.attention_time_s(missed_tokens, cached_tokens)
    return engine.slowness * (engine.queue_s(now_s) + own_s)


def _scores(engines: Collection[EngineView], load: Callable[[EngineView], float]) -> dict[EngineView, float]:
    """1 for the least loaded engine, 0 for the most loaded one."""
    loads: Sequence[float] = [load(engine) for engine in engines]
    least, most = min(loads), max(loads)
    return {
        engine: 1.0 if most == least else (most - one) / (most - least)
        for engine, one in zip(engines, loads, strict=True)
    }
