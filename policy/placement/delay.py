"""The policy `plait`: a call goes where it delays itself and all others least, in seconds.

The delay on an engine has five parts. The call waits for the prefills before its own (queue), for its own prefill and
for its decode. The calls that are there wait while its prompt is computed (stall). Their decodes take longer beside its
own (slow). So exploiting a cached prefix and exploring are one comparison: a prefix is copied to another engine once
using it costs more than computing it again. See docs/design/placement.md.
"""

from __future__ import annotations

from math import inf

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.situation import Situation, cached_blocks, placed
from plait.policy.types import Call, DelayCost, Placement, PlacementReason

LEFT_SHARE = 0.5
"""The part of its answer that a call still has to decode, on average over the calls that are there."""


def least_delay(call: Call, situation: Situation) -> Placement:
    """The engine with the least delay. Ties: in turn.

    A call with a TTFT goes to an engine that is expected to meet it. If none is, the placement is at risk, and the call
    goes where its first token is expected first.
    """
    output_tokens = situation.traffic.expected_output_tokens(call.output_limit)
    ttft_s = inf if call.slo is None or call.slo.ttft_s is None else call.slo.ttft_s
    chosen: list[tuple[DelayCost, int, EngineView]] = []
    least = (inf, inf)
    for engine in situation.engines:
        held_blocks = cached_blocks(call, situation, engine)
        cost = delay_cost(call, engine, held_blocks, output_tokens, situation.now_s)
        late_s = max(0.0, cost.first_token_s - ttft_s)
        rank = (late_s, cost.total_s)
        if rank < least:
            least, chosen = rank, []
        if rank == least:
            chosen.append((cost, held_blocks, engine))
    cost, held_blocks, engine = chosen[situation.turn % len(chosen)]
    exploits = 2 * held_blocks * call.block_tokens > call.prompt_tokens
    reason = PlacementReason.EXPLOIT if exploits else PlacementReason.EXPLORE
    return placed(call, engine, reason, held_blocks, cost, is_at_risk=least[0] > 0)


def delay_cost(call: Call, engine: EngineView, held_blocks: int, output_tokens: float, now_s: float) -> DelayCost:
    """The delay of placing `call` on `engine`, which has `held_blocks` of its prompt. It answers `output_tokens`."""
    costs, calls = engine.cost_model, engine.outstanding
    cached_tokens = held_blocks * call.block_tokens
    missed_tokens = call.prompt_tokens - cached_tokens
    attention_s = costs.attention_time_s(missed_tokens, cached_tokens)
    context_tokens = engine.context_tokens
    before_s = engine.iteration_s
    after_s = costs.decode_iteration_s(calls + 1, context_tokens + call.prompt_tokens + output_tokens / 2)
    slowness = engine.pace.slowness(now_s)
    is_urgent = call.slo is not None and call.slo.ttft_s is not None
    return DelayCost(
        queue_s=slowness * (engine.urgent_queue_s(now_s) if is_urgent else engine.queue_s(now_s)),
        prefill_s=slowness * engine.prefill_s(missed_tokens, cached_tokens),
        decode_s=slowness * output_tokens * after_s,
        stall_s=slowness * calls * (costs.marginal_s(missed_tokens) + attention_s),
        slow_s=slowness * calls * LEFT_SHARE * output_tokens * (after_s - before_s),
    )
