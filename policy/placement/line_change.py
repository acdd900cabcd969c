"""What is gained if a call that waits for one engine goes to another that has nothing to do, in seconds."""

from __future__ import annotations

from plait.policy.placement.delay import Asked, Present, delay_beside, delay_cost
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.situation import Situation, cached_blocks, placed
from plait.policy.prefix.prefix_tree import Node
from plait.policy.types import FIRST_TOKEN_WEIGHT, Placement, PlacementReason


def change_gain_s(
    asked: Asked, situation: Situation, there: EngineView, ahead_s: float, waits: tuple[int, Node]
) -> tuple[float, Placement]:
    """How much less delay the call causes on the situation's one engine than `there`, where it waits; its placement.

    There work of `ahead_s` is before it. `waits` are the blocks of its prompt that it finds there, and the node that
    the prompt ends at. What it would compute there for others is lost.
    """
    held_blocks, leaf = waits
    call, here = asked.call, situation.engines[0]
    own_tokens = call.prompt_tokens + there.ledger.mean_output_tokens / 2
    present = Present(there.calls - 1, max(0.0, there.context_tokens - own_tokens), ahead_s)
    there_s = delay_beside(asked, there, held_blocks, present).total_s
    blocks = cached_blocks(call, situation, here)
    cost = delay_cost(asked, here, blocks, situation.now_s)
    reason = PlacementReason.EXPLOIT if 2 * blocks * call.block_tokens > call.prompt_tokens else PlacementReason.EXPLORE
    gain_s = there_s - cost.total_s - _lost_s(call.block_tokens, there, held_blocks, leaf)
    return gain_s, placed(call, here, reason, blocks, cost)


def _lost_s(block_tokens: int, there: EngineView, held_blocks: int, leaf: Node) -> float:
    """The prefill that others count on: blocks that the call computes there, and that other calls have booked too."""
    blocks = 0
    for node in leaf.path():
        if node.end_blocks <= held_blocks:
            break
        holding = node.held_by(there.engine_id)
        if holding is not None and holding.bookings > 1:
            blocks += node.end_blocks - max(held_blocks, node.start_blocks)
    if not blocks:
        return 0.0
    return (
        FIRST_TOKEN_WEIGHT
        * there.slowness
        * there.cost_model.prefill_time_s(blocks * block_tokens, held_blocks * block_tokens)
    )
