"""More placement of other gateways, each from its public documentation and source; `lab/simulation/rivals.py` has
those of `plait demo --compare`.
"""

from __future__ import annotations

from typing import Final

from benchmarks.placing.baselines import LMETRIC
from plait.lab.simulation.rivals import KNOWN, cached_blocks, in_own_order, in_turn, place
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Situation
from plait.policy.placement.policies import Policy, by_name
from plait.policy.types import Call, Placement

LLMD_STICKY: Final = (0.99, 0.8)
"""llm-d's latency profile: engines with such a share of the prompt are looked at first, the larger share before."""
LLMD_LATER_S: Final = 5.0
"""They are left if their predicted TTFT is by so much later than the best."""
BOUNDED_LOAD: Final = 1.25


def prefix_hash(call: Call, situation: Situation) -> Placement:
    """As `session_hash`, with bounded load: the next engine in the call's own order while one has too many calls."""
    order = in_own_order(call, situation)
    most = BOUNDED_LOAD * (1 + sum(one.outstanding for one in order)) / len(order)
    engine = next((one for one in order if one.outstanding + 1 <= most), order[0])
    return place(call, engine, cached_blocks(call, situation))


def llmd_latency(call: Call, situation: Situation) -> Placement:
    """Sticky while that costs little TTFT, then the least predicted TTFT."""
    held, engines = cached_blocks(call, situation), in_turn(situation)
    ttfts_s = {engine: _ttft_s(call, engine, held[engine], situation.now_s) for engine in engines}
    best_s = min(ttfts_s.values())
    for share in LLMD_STICKY:
        sticky = [one for one in engines if held[one] >= share * max(1, call.cacheable_blocks)]
        if sticky and min(ttfts_s[one] for one in sticky) - best_s <= LLMD_LATER_S:
            return place(call, min(sticky, key=ttfts_s.__getitem__), held)
    return place(call, min(engines, key=ttfts_s.__getitem__), held)


def kv_aware(call: Call, situation: Situation) -> Placement:
    """vllm-router's policy on cache events: the engine with the longest prefix, or if none has any, the least loaded.

    Load counts for nothing while some engine has a block of the prompt.
    """
    held, engines = cached_blocks(call, situation), in_turn(situation)
    longest = max(held.values())
    if longest:
        return place(call, next(one for one in engines if held[one] == longest), held)
    return place(call, min(engines, key=lambda one: one.outstanding), held)


def dynamo_cost(call: Call, situation: Situation) -> Placement:
    """The least sum of blocks to compute and blocks in use."""
    held, engines = cached_blocks(call, situation), in_turn(situation)

    def cost(engine: EngineView) -> float:
        missed_tokens = call.prompt_tokens - held[engine] * call.block_tokens
        return engine.queue.tokens + missed_tokens + engine.context_tokens + call.prompt_tokens

    return place(call, min(engines, key=cost), held)


RIVALS: Final = by_name(
    KNOWN["round_robin"],
    KNOWN["least_outstanding"],
    KNOWN["session_hash"],
    Policy("prefix_hash", "prefix hash", prefix_hash),
    KNOWN["smg"],
    KNOWN["llmd"],
    Policy("llmd_latency", "llm-d (latency)", llmd_latency),
    Policy("kv_aware", "vllm-router (KV aware)", kv_aware),
    Policy("dynamo_cost", "Dynamo (cost)", dynamo_cost),
    LMETRIC,
    KNOWN["e2"],
)
"""All but ours, by name."""


def _ttft_s(call: Call, engine: EngineView, blocks: int, now_s: float) -> float:
    """As a learned predictor would give it: by the engine's own cost model."""
    cached_tokens = blocks * call.block_tokens
    missed_tokens = call.prompt_tokens - cached_tokens
    own_s = engine.drain_s(missed_tokens) + engine.cost_model.added_s(missed_tokens, cached_tokens)[1]
    return engine.slowness * (engine.queue_s(now_s) + own_s)
