"""The delay that a call causes on an engine, to itself and to all others, in seconds.

The delay is the weighted sum of the parts in `DelayCost`. A policy computes the sum for each engine and takes the
least. So one comparison decides between exploiting a cached prefix and exploring: a prefix is copied to another engine
once the queue at the cached one costs more than computing the prefix again. See docs/design/placement.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from math import ceil, inf
from typing import Final

from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import NONE_OVERTAKEN, Overtaken, Situation, cached_prefix, loads_of, placed
from plait.policy.prefix.prefix_tree import Node
from plait.policy.types import NO_SLO, Call, Compared, Placement

STALLED_SHARE = 0.5
"""The part of the engine's present calls that still decodes when a new prompt is computed."""

LEFT_SHARE = 0.5
"""The part of its answer that an engine's present call still has to decode, on average."""

LATER = 1.5
"""Work delays every call that arrives before the queue is empty: 1 / (1 - utilisation) times, taken at 1/3."""

ELSEWHERE = 2.5
"""A later call waits at most this many whole prefills of a mean prompt: beyond, it would go to another engine.

Without a limit, long prompts avoid the engines that have work, and delay short ones everywhere: tool lists among long
documents take a quarter longer at 1.5 times round robin's saturation. Between 2 and 4 little changes elsewhere; with 1,
static documents near saturation lose a third.
"""

EVICTED = 8.0
"""The weight of a second of prefill that an eviction causes. Between 5 and 16 little changes.

A repeated prefill delays its own call (twice: TTFT and E2E), the calls beside it, and later ones.
"""

MOST_VICTIMS = 64
"""The search for what a call evicts ends after this many tree nodes."""


FIRST_TOKEN_WEIGHT: Final = 2.0
"""A second before a first token lengthens both TTFT and E2E."""

BEFORE_FIRST_TOKENS: Final = ("queue", "load", "prefill", "later")
"""The parts of a delay that count `FIRST_TOKEN_WEIGHT` times."""


@dataclass(slots=True)
class DelayCost:
    """The parts of a delay, unweighted. Nothing changes them once the call is placed."""

    queue_s: float
    """The call waits for the prefills queued before its own."""
    prefill_s: float
    """The call's own prefill."""
    decode_s: float
    """The call's own decode."""
    stall_s: float
    """The engine's present calls stall while the new prompt is computed."""
    slow_s: float
    """The present calls decode in longer iterations beside the new one."""
    later_s: float = 0.0
    """Calls that arrive later find a longer queue."""
    evicted_s: float = 0.0
    """Prefixes that the engine evicts for the call are computed again."""
    repaid_s: float = 0.0
    """A copy of the prefix on this engine saves later calls this delay (`least_delay.repay_copies`)."""
    load_s: float = 0.0
    """After the queue, the call waits for blocks that still come from lower tiers."""

    @property
    def first_token_s(self) -> float:
        return self.queue_s + self.load_s + self.prefill_s

    @property
    def total_s(self) -> float:
        """The weighted sum."""
        before_s = self.queue_s + self.load_s + self.prefill_s + self.later_s
        rest_s = self.decode_s + self.stall_s + self.slow_s + self.evicted_s - self.repaid_s
        return FIRST_TOKEN_WEIGHT * before_s + rest_s


@dataclass(slots=True)
class CallToPlace:
    """A call to be placed, with the figures that do not depend on the engine."""

    call: Call
    output_tokens: float
    """The expected length of the answer."""
    ttft_s: float
    """What is left of the TTFT: infinite without one, negative once it is missed."""
    rate: float = 0.0
    """Arrivals at an engine: calls a second for each token a second of the engine's prefill speed."""
    most_wait_s: float = inf
    """The most seconds that a later call is taken to wait behind this one (`ELSEWHERE`)."""
    jct_s: float = inf
    """What is left of the JCT, as for `ttft_s`."""
    sent_weight: float = 1.0
    """As `Overtaken.sent_weight`."""
    is_promised: bool = field(init=False)
    """Whether there is a TTFT or a JCT. Without one, no placement is late."""

    def __post_init__(self) -> None:
        self.is_promised = not self.ttft_s == self.jct_s == inf

    @classmethod
    def of(cls, call: Call, situation: Situation) -> CallToPlace:
        slo, age_s = call.slo or NO_SLO, situation.now_s - call.arrived_s
        ttft_s = inf if slo.ttft_s is None else slo.ttft_s - age_s
        jct_s = inf if slo.jct_s is None else slo.jct_s - age_s
        output_tokens, coming = situation.traffic.expected_output_tokens(call.output_limit), situation.coming()
        costs, tokens = situation.engines[0].cost_model, round(coming.prompt_tokens)
        prefill_s = costs.added_s(tokens, 0)[0] * costs.tokens_per_s / coming.tokens_per_s
        rate, sent_weight = coming.rate_s / coming.tokens_per_s, situation.overtaken.sent_weight
        return cls(call, output_tokens, ttft_s, rate, ELSEWHERE * prefill_s, jct_s, sent_weight)

    def late_s(self, cost: DelayCost) -> float:
        """By how many seconds the TTFT or the JCT will be missed, the larger of both; 0 if both will be met."""
        first_s = cost.first_token_s
        return max(0.0, first_s - self.ttft_s, first_s + cost.decode_s - self.jct_s)

    def placed(
        self, engine: EngineView, cached_blocks: int, cost: DelayCost, compared: Compared | None = None
    ) -> Placement:
        meets_slo = self.late_s(cost) == 0.0 if self.is_promised else None
        return placed(
            self.call,
            engine,
            None,
            cached_blocks,
            cost,
            meets_slo=meets_slo,
            first_token_s=cost.queue_s + cost.load_s + cost.prefill_s,  # reading the property costs a function call
            decode_s=cost.decode_s,
            compared=compared,
        )


Rank = tuple[float, float]
"""(seconds by which the TTFT or the JCT is missed, whole delay). The least is the best."""


@dataclass(slots=True)
class Offer:
    """One engine's candidacy for a call."""

    rank: Rank
    engine: EngineView
    cached_blocks: int
    cost: DelayCost


def offer(asked: CallToPlace, situation: Situation, engine: EngineView) -> Offer:
    """Compute the delay of the call on `engine`."""
    if engine.tiers.views:
        cached_blocks, ready_s = loads_of(asked.call, situation, engine)
        cost = delay_cost(asked, engine, cached_blocks, situation.now_s, situation.overtaken)
        cost.load_s = max(0.0, ready_s - cost.queue_s)
    else:
        cached_blocks = cached_prefix(asked.call, situation, engine)
        cost = delay_cost(asked, engine, cached_blocks, situation.now_s, situation.overtaken)
    # Only blocks that leave the last tier are lost; its `free_tokens` include the faster tiers.
    free_tokens = engine.tiers.views[-1].free_tokens if engine.tiers.views else engine.free_tokens
    if free_tokens is not None:
        missed_tokens = asked.call.prompt_tokens - cached_blocks * asked.call.block_tokens
        short_tokens = missed_tokens + engine.ledger.mean_output_tokens - free_tokens
        if short_tokens > 0:
            cost.evicted_s = _evicted_s(asked.call, situation, engine, short_tokens)
    late_s = asked.late_s(cost) if asked.is_promised else 0.0
    return Offer((late_s, cost.total_s), engine, cached_blocks, cost)


def _evicted_s(call: Call, situation: Situation, engine: EngineView, short_tokens: float) -> float:
    """The delay of the prefills that repeat, once each, because the call makes the last tier evict blocks by LRU."""
    own, now_s, costs, lost_s = {segment.node for segment in situation.path}, situation.now_s, engine.cost_model, 0.0
    for node, blocks in islice(engine.tiers.lowest.victims(ceil(short_tokens / call.block_tokens), own), MOST_VICTIMS):
        uses = node.uses(now_s)
        if uses:
            lost_s += min(1.0, uses) * costs.marginal_s(blocks * call.block_tokens)
    return EVICTED * engine.slowness * lost_s


def delay_cost(
    asked: CallToPlace, engine: EngineView, cached_blocks: int, now_s: float, overtaken: Overtaken = NONE_OVERTAKEN
) -> DelayCost:
    """The delay of placing the call on `engine`, which has `cached_blocks` of its prompt.

    The calls in `overtaken` wait behind this one in the gateway. So they are not in its queue, but it delays them.
    """
    calls, context_tokens, queue_s = engine.calls, engine.context_tokens, 0.0
    if engine.queue.unsent or engine.queue.sent:
        call, line = asked.call, overtaken.lines.get(engine.engine_id)
        is_urgent = call.slo is not None and call.is_urgent(now_s)
        share = 0.0 if line is None else line.prefill
        queue_s = engine.slowness * engine.queue_s(now_s, is_urgent=is_urgent, overtaken_share=share)
    if overtaken.calls:
        calls = calls_beside(engine, overtaken)
        context_tokens *= calls / max(1, engine.calls)
    return delay_beside(asked, engine, cached_blocks, calls, context_tokens, queue_s=queue_s)


def calls_beside(engine: EngineView, overtaken: Overtaken) -> int:
    """The engine's calls, where the `overtaken` ones count as an average over engines instead of those waiting here."""
    line = overtaken.lines.get(engine.engine_id)
    return engine.calls + round(overtaken.calls - (0.0 if line is None else line.calls))


def cost_with_copy(asked: CallToPlace, offer: Offer, cached_blocks: int, overtaken: Overtaken) -> DelayCost:
    """The delay on the offer's engine if `cached_blocks` of the prompt were cached there, without evictions.

    Queue and decode are those of the offer.
    """
    engine, cost = offer.engine, offer.cost
    delayed = counted(asked, engine, calls_beside(engine, overtaken)) if overtaken.calls else engine.calls
    prefill_s, stall_s, later_s = _prompt_s(asked, engine, cached_blocks, delayed, cost.queue_s)
    return DelayCost(cost.queue_s, prefill_s, cost.decode_s, stall_s, cost.slow_s, later_s)


def joined_cost(asked: CallToPlace, first: Offer, cached_blocks: int, others: int) -> DelayCost:
    """The delay of a sibling of the call that took the `first` offer, behind `others` calls of the group there.

    `others` counts that call. The first call computes `cached_blocks` of the prompt, which its siblings then share.
    """
    engine, call = first.engine, asked.call
    drain_s = engine.slowness * engine.drain_s(call.prompt_tokens - cached_blocks * call.block_tokens)
    context_tokens = engine.context_tokens + others * (call.prompt_tokens + asked.output_tokens / 2)
    queue_s = first.cost.first_token_s + (others - 1) * drain_s
    return delay_beside(asked, engine, cached_blocks, engine.calls + others, context_tokens, queue_s=queue_s)


def delay_beside(
    asked: CallToPlace, engine: EngineView, cached_blocks: int, calls: int, context_tokens: float, *, queue_s: float
) -> DelayCost:
    """The delay of a call on `engine` after a wait of `queue_s`, with `cached_blocks` of its prompt cached.

    The engine has `calls` others, whose contexts sum to `context_tokens`.
    """
    output_tokens, slowness, costs = asked.output_tokens, engine.slowness, engine.cost_model
    delayed = calls if asked.sent_weight == 1.0 else counted(asked, engine, calls)
    prefill_s, stall_s, later_s = _prompt_s(asked, engine, cached_blocks, delayed, queue_s)
    after_s = costs.decode_iteration_s(calls + 1, context_tokens + asked.call.prompt_tokens + output_tokens / 2)
    slow_s = 0.0
    if calls:
        before_s = costs.decode_iteration_s(calls, context_tokens)
        slow_s = slowness * delayed * LEFT_SHARE * output_tokens * (after_s - before_s)
    return DelayCost(queue_s, prefill_s, slowness * output_tokens * after_s, stall_s, slow_s, later_s)


def _prompt_s(
    asked: CallToPlace, engine: EngineView, cached_blocks: int, delayed: float, queue_s: float
) -> tuple[float, float, float]:
    """(prefill, stall of the `delayed` calls, delay of later calls) of a prompt that starts after `queue_s`."""
    call, slowness, costs = asked.call, engine.slowness, engine.cost_model
    cached_tokens = cached_blocks * call.block_tokens
    missed_tokens = call.prompt_tokens - cached_tokens
    drain_s = engine.drain_s(missed_tokens)
    added_s, attention_s = costs.added_s(missed_tokens, cached_tokens)
    work_s = slowness * added_s
    for rank in engine.siblings:
        delayed += rank.calls
    prefill_s = slowness * (drain_s + attention_s)
    wait_s = min(asked.most_wait_s, queue_s + prefill_s / 2)
    later_s = LATER * asked.rate * costs.tokens_per_s * work_s * wait_s  # a slow engine gets fewer calls
    return prefill_s, STALLED_SHARE * delayed * work_s, later_s


def counted(asked: CallToPlace, engine: EngineView, calls: int) -> float:
    """The engine's `calls`, where a sent one counts with its weight."""
    return calls - (1.0 - asked.sent_weight) * (engine.calls - engine.queue.unsent)


def change_gain_s(
    asked: CallToPlace, situation: Situation, there: EngineView, ahead_s: float, waits: tuple[int, Node]
) -> tuple[float, Placement]:
    """What moving a waiting call from `there` to the situation's one engine gains in delay, and the new placement.

    The call waits behind `ahead_s` of work. `waits` is (blocks of its prompt cached there by then, the prompt's last
    node). The gain is less by the prefill that other calls there expected this call to do for them.
    """
    cached_blocks, leaf = waits
    call, here = asked.call, situation.engines[0]
    own_tokens = call.prompt_tokens + there.ledger.mean_output_tokens / 2
    context_tokens = max(0.0, there.context_tokens - own_tokens)
    there_s = delay_beside(asked, there, cached_blocks, there.calls - 1, context_tokens, queue_s=ahead_s).total_s
    blocks, ready_s = loads_of(call, situation, here)
    cost = delay_cost(asked, here, blocks, situation.now_s)
    cost.load_s = max(0.0, ready_s - cost.queue_s)
    gain_s = there_s - cost.total_s - _lost_s(call.block_tokens, there, cached_blocks, leaf)
    return gain_s, asked.placed(here, blocks, cost, _MOVED)


_MOVED: Final = Compared("moved")


def _lost_s(block_tokens: int, there: EngineView, cached_blocks: int, leaf: Node) -> float:
    """The delay of the blocks that the call was to compute `there` and that other booked calls share."""
    blocks = 0
    for node in leaf.path():
        if node.end_blocks <= cached_blocks:
            break
        holding = node.holding_of(there.engine_id)
        if holding is not None and holding.bookings > 1:
            blocks += node.end_blocks - max(cached_blocks, node.start_blocks)
    if not blocks:
        return 0.0
    return (
        FIRST_TOKEN_WEIGHT
        * there.slowness
        * there.cost_model.prefill_time_s(blocks * block_tokens, cached_blocks * block_tokens)
    )
