"""The delay that a call causes on an engine, to itself and to all others, in seconds.

The call waits for the prefills before its own (queue), then for what still comes from lower tiers of the cache (load),
for its own prefill and for its decode. Of the calls that are there, those that decode wait while its prompt is computed
(stall). Their decodes take longer beside its own (slow). Prompts that come later begin later (later). What the engine
drops for it is computed again (evicted). A copy of a prefix saves later calls some of that (repaid, see
`least_delay.Copy`).

So exploiting a cached prefix and exploring are one comparison: a prefix is copied to another engine once using it costs
more than computing it again. See docs/design/placement.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import ceil, inf
from typing import Final

from plait.policy.costs.engine_view import LEFT_SHARE, EngineView
from plait.policy.costs.situation import NOTHING_PASSED, Passed, Situation, cached_prefix, loads_of, placed
from plait.policy.prefix.prefix_tree import Node
from plait.policy.types import NO_SLO, Call, Compared, Placement

STALLED_SHARE = 0.5
"""Of the calls that are there, so many still decode when a new prompt is computed."""

LATER = 1.5
"""Work delays all calls that come before the queue is empty: 1 / (1 - utilisation) times, at a third."""

ELSEWHERE = 2.5
"""No later call waits longer than so many whole prefills of a mean prompt: it goes to another engine before.

Without a limit, long prompts avoid the engines that have work, and delay short ones everywhere: tool lists among long
documents take a quarter longer at 1.5 times round robin's saturation. Between 2 and 4 little changes elsewhere; with 1,
static documents near saturation lose a third.
"""

EVICTED = 8.0
"""A prefill delays its own call, which counts twice, the calls that are there, and later ones.

So the seconds that are computed again count so many times. Between 5 and 16 little changes.
"""

MOST_VICTIMS = 64
"""So many nodes are looked at for what a call evicts."""


FIRST_TOKEN_WEIGHT: Final = 2.0
"""A second before a first token is one of TTFT and one of E2E."""

BEFORE_FIRST_TOKENS: Final = ("queue", "load", "prefill", "later")
"""The parts of a delay that have this weight."""


@dataclass(slots=True)
class DelayCost:
    """The delay that a call on an engine causes to itself and to others, in seconds. It is only read once placed."""

    queue_s: float
    prefill_s: float
    decode_s: float
    stall_s: float
    slow_s: float
    later_s: float = 0.0
    evicted_s: float = 0.0
    repaid_s: float = 0.0
    load_s: float = 0.0

    @property
    def first_token_s(self) -> float:
        """When the call's first token is expected."""
        return self.queue_s + self.load_s + self.prefill_s

    @property
    def total_s(self) -> float:
        """All of it, with a weight of two for what is before first tokens."""
        before_s = self.queue_s + self.load_s + self.prefill_s + self.later_s
        rest_s = self.decode_s + self.stall_s + self.slow_s + self.evicted_s - self.repaid_s
        return FIRST_TOKEN_WEIGHT * before_s + rest_s

    def weighted_s(self) -> dict[str, float]:
        """The parts by their names, as they count: they sum to `total_s`."""
        before = {part: FIRST_TOKEN_WEIGHT * getattr(self, f"{part}_s") for part in BEFORE_FIRST_TOKENS}
        rest = {part: getattr(self, f"{part}_s") for part in ("decode", "stall", "slow", "evicted")}
        return {**before, **rest, "repaid": -self.repaid_s}


@dataclass(slots=True)
class CallToPlace:
    """A call to be placed: the length that is expected of its answer, and what is left of its TTFT and of its JCT.

    These are infinite if it has none, and negative once they are over. For each token that an engine can compute in a
    second, `rate` calls a second come there, and none of them waits longer than `most_wait_s`.
    """

    call: Call
    output_tokens: float
    ttft_s: float
    rate: float = 0.0
    most_wait_s: float = inf
    jct_s: float = inf

    @classmethod
    def of(cls, call: Call, situation: Situation) -> CallToPlace:
        """`call` in this situation."""
        slo, age_s = call.slo or NO_SLO, situation.now_s - call.arrived_s
        ttft_s = inf if slo.ttft_s is None else slo.ttft_s - age_s
        jct_s = inf if slo.jct_s is None else slo.jct_s - age_s
        output_tokens, coming = situation.traffic.expected_output_tokens(call.output_limit), situation.coming()
        costs, tokens = situation.engines[0].cost_model, round(coming.prompt_tokens)
        prefill_s = costs.added_s(tokens, 0)[0] * costs.tokens_per_s / coming.tokens_per_s
        return cls(call, output_tokens, ttft_s, coming.rate_s / coming.tokens_per_s, ELSEWHERE * prefill_s, jct_s)

    def late_s(self, cost: DelayCost) -> float:
        """By how much the first token or the last one is expected too late, whichever is later; 0 if neither is."""
        first_s = cost.first_token_s
        return max(0.0, first_s - self.ttft_s, first_s + cost.decode_s - self.jct_s)

    def placed(
        self, engine: EngineView, cached_blocks: int, cost: DelayCost, compared: Compared | None = None
    ) -> Placement:
        """The placement on `engine`, which has `cached_blocks` of the prompt, and whether its times are met there."""
        meets_slo = None if self.ttft_s == self.jct_s == inf else self.late_s(cost) == 0.0
        return placed(
            self.call,
            engine,
            None,
            cached_blocks,
            cost,
            meets_slo=meets_slo,
            first_token_s=cost.queue_s + cost.load_s + cost.prefill_s,  # its property would be one more call
            decode_s=cost.decode_s,
            compared=compared,
        )


Rank = tuple[float, float]
"""By how much the TTFT or the JCT is missed, and the whole delay. The least is the best."""


@dataclass(slots=True)
class Offer:
    """What an engine offers to a call."""

    rank: Rank
    engine: EngineView
    cached_blocks: int
    cost: DelayCost


def offer(asked: CallToPlace, situation: Situation, engine: EngineView) -> Offer:
    """What `engine` offers to the call."""
    if engine.tiers.views:
        cached_blocks, ready_s = loads_of(asked.call, situation, engine)
        cost = delay_cost(asked, engine, cached_blocks, situation.now_s, situation.passed)
        cost.load_s = max(0.0, ready_s - cost.queue_s)
    else:
        cached_blocks = cached_prefix(asked.call, situation, engine)
        cost = delay_cost(asked, engine, cached_blocks, situation.now_s, situation.passed)
    free_tokens = engine.tiers.views[-1].free_tokens if engine.tiers.views else engine.free_tokens
    if free_tokens is not None:
        evicted_s = _evicted_s(asked.call, situation, engine, cached_blocks, free_tokens)
        if evicted_s:
            cost.evicted_s = evicted_s
    return Offer((asked.late_s(cost), cost.total_s), engine, cached_blocks, cost)


def _evicted_s(call: Call, situation: Situation, engine: EngineView, cached_blocks: int, free_tokens: float) -> float:
    """The delay of what will be computed again, once, because LRU drops it for the call from the last tier."""
    missed_tokens = call.prompt_tokens - cached_blocks * call.block_tokens
    short_tokens = missed_tokens + engine.ledger.mean_output_tokens - free_tokens
    if short_tokens <= 0:
        return 0.0
    own, now_s, costs, lost_s = {segment.node for segment in situation.path}, situation.now_s, engine.cost_model, 0.0
    for node, blocks in islice(engine.tiers.lowest.victims(ceil(short_tokens / call.block_tokens), own), MOST_VICTIMS):
        uses = node.uses(now_s)
        if uses:
            lost_s += min(1.0, uses) * costs.marginal_s(blocks * call.block_tokens)
    return EVICTED * engine.slowness * lost_s


def delay_cost(
    asked: CallToPlace, engine: EngineView, cached_blocks: int, now_s: float, passed: Passed = NOTHING_PASSED
) -> DelayCost:
    """The delay of placing the call on `engine`, which has `cached_blocks` of its prompt.

    It does not wait for the calls that it has `passed`, but they for it.
    """
    calls, context_tokens, queue_s = engine.calls, engine.context_tokens, 0.0
    if engine.queue.unsent or engine.queue.sent:
        share, is_urgent = passed.shares.get(engine.engine_id, 0.0), asked.call.due_s < inf
        queue_s = engine.slowness * engine.queue_s(now_s, is_urgent=is_urgent, passed_share=share)
    if passed.calls:
        calls = calls_beside(engine, passed)
        context_tokens *= calls / max(1, engine.calls)
    return delay_beside(asked, engine, cached_blocks, calls, context_tokens, queue_s=queue_s)


def calls_beside(engine: EngineView, passed: Passed) -> int:
    """The calls on an engine for one that has `passed` some that wait."""
    return engine.calls + round(passed.calls - passed.shares.get(engine.engine_id, 0.0) * engine.queue.unsent)


def cost_with_copy(asked: CallToPlace, offer: Offer, cached_blocks: int, passed: Passed) -> DelayCost:
    """The delay on an offer's engine if that had `cached_blocks` of the prompt. Its queue and decodes are the same.

    What the engine drops for it is left out.
    """
    engine, cost = offer.engine, offer.cost
    calls = calls_beside(engine, passed) if passed.calls else engine.calls
    prefill_s, stall_s, later_s = _prompt_s(asked, engine, cached_blocks, calls, cost.queue_s)
    return DelayCost(cost.queue_s, prefill_s, cost.decode_s, stall_s, cost.slow_s, later_s)


def joined_cost(asked: CallToPlace, first: Offer, cached_blocks: int, others: int) -> DelayCost:
    """The delay of a call like the one that took the `first` offer, which is the first of so many `others` there.

    All but the first have `cached_blocks` of their prompts in the engine's cache.
    """
    engine, call = first.engine, asked.call
    drain_s = engine.slowness * engine.drain_s(call.prompt_tokens - cached_blocks * call.block_tokens)
    context_tokens = engine.context_tokens + others * (call.prompt_tokens + asked.output_tokens / 2)
    queue_s = first.cost.first_token_s + (others - 1) * drain_s
    return delay_beside(asked, engine, cached_blocks, engine.calls + others, context_tokens, queue_s=queue_s)


def delay_beside(
    asked: CallToPlace, engine: EngineView, cached_blocks: int, calls: int, context_tokens: float, *, queue_s: float
) -> DelayCost:
    """The delay of a call on `engine` beside so many `calls` with `context_tokens` in all, after waiting `queue_s`.

    The engine has `cached_blocks` of its prompt.
    """
    output_tokens, slowness, costs = asked.output_tokens, engine.slowness, engine.cost_model
    prefill_s, stall_s, later_s = _prompt_s(asked, engine, cached_blocks, calls, queue_s)
    after_s = costs.decode_iteration_s(calls + 1, context_tokens + asked.call.prompt_tokens + output_tokens / 2)
    slow_s = 0.0
    if calls:
        known = engine.floor
        if known is not None and calls == engine.calls and context_tokens == engine.context_tokens:
            before_s = known.iteration_s
        else:
            before_s = costs.decode_iteration_s(calls, context_tokens)
        slow_s = slowness * calls * LEFT_SHARE * output_tokens * (after_s - before_s)
    return DelayCost(queue_s, prefill_s, slowness * output_tokens * after_s, stall_s, slow_s, later_s)


def _prompt_s(
    asked: CallToPlace, engine: EngineView, cached_blocks: int, calls: int, queue_s: float
) -> tuple[float, float, float]:
    """What computing the prompt takes behind `queue_s`, and by how much it delays the `calls` there, and later ones."""
    call, slowness, costs = asked.call, engine.slowness, engine.cost_model
    cached_tokens = cached_blocks * call.block_tokens
    missed_tokens = call.prompt_tokens - cached_tokens
    drain_s = engine.drain_s(missed_tokens)
    added_s, attention_s = costs.added_s(missed_tokens, cached_tokens)
    work_s = slowness * added_s
    prefill_s = slowness * (drain_s + attention_s)
    wait_s = min(asked.most_wait_s, queue_s + prefill_s / 2)
    later_s = LATER * asked.rate * costs.tokens_per_s * work_s * wait_s  # a slow engine gets the fewer calls
    return prefill_s, STALLED_SHARE * calls * work_s, later_s


def change_gain_s(
    asked: CallToPlace, situation: Situation, there: EngineView, ahead_s: float, waits: tuple[int, Node]
) -> tuple[float, Placement]:
    """How much less delay the call causes on the situation's one engine than `there`, where it waits; its placement.

    There work of `ahead_s` is before it. `waits` are the blocks of its prompt that it finds there, and the node that
    the prompt ends at. What it would compute there for others is lost.
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
    """The prefill that others count on: blocks that the call computes there, and that other calls have booked too."""
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
