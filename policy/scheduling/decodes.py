"""The running decodes of an iteration, and how they limit the prompts beside them."""

from __future__ import annotations

from plait.policy.scheduling.batching import Batch
from plait.policy.scheduling.moment import Moment, preemption_key

FLOOR_SHARE = 0.1
"""Ours: prompts get this share of the engine's maximum if decodes alone exceed their iteration SLO."""

WATERMARK_BLOCKS = 2
"""Ours: the free blocks that are reserved for each running decode when prompts are admitted."""


def add_decodes(moment: Moment, batch: Batch) -> None:
    """Add the running decodes. While blocks are short, preempt the cheapest victim."""
    needed = moment.facts.blocks_needed
    tokens = sum([tokens for _, tokens, _ in moment.decodes])
    blocks = sum([needed(call, tokens) for call, tokens, _ in moment.decodes])
    if tokens <= moment.facts.max_batch_tokens and blocks <= batch.free_blocks:
        batch.add_decodes(moment.decodes, tokens, blocks)
    else:
        _add_some(moment, batch)


def _add_some(moment: Moment, batch: Batch) -> None:
    victims = [*moment.preemption_order]
    for decode in sorted(moment.decode_candidates, key=preemption_key):
        if decode.call in batch.preempted:
            continue
        tokens = batch.budget.room(decode.tokens, decode.context_tokens)
        if not tokens:
            break
        need = moment.facts.blocks_needed(decode.call, tokens)
        while need > batch.free_blocks:
            victim = victims.pop()
            batch.preempt(victim.call)
            if victim is decode:
                break
        else:
            batch.add(decode, tokens)


def limit_to_tightest_slo(moment: Moment, batch: Batch) -> None:
    """Limit the iteration to the decodes' tightest iteration SLO.

    If the decodes alone take longer than that, prompts get `FLOOR_SHARE` all the same.
    """
    base_s = batch.budget.time_s()
    tightest_s = moment.objectives.tightest_s([call for call, _, _ in moment.decodes], moment.now_s, moment.pace)
    if tightest_s < base_s:
        batch.floor_tokens = max(1, int(FLOOR_SHARE * moment.facts.max_batch_tokens))
    batch.limit(max(tightest_s, base_s))


def reserve_blocks(moment: Moment, batch: Batch) -> None:
    """Reserve the blocks that prompts begun still need, and `WATERMARK_BLOCKS` for each decode."""
    needed = moment.facts.blocks_needed
    begun = sum(needed(prefill.call, prefill.tokens) for prefill in moment.prefills)
    batch.unreserved_blocks = batch.free_blocks - begun - WATERMARK_BLOCKS * len(moment.decodes)
