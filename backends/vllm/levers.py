"""The levers of vLLM's scheduler: the state that its `schedule()` reads, as a plan sets it for one iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from plait.backends.vllm.calls import VllmCall, VllmFacts
from plait.policy.scheduling.plan import LocalCall, Plan


class VllmLevers:
    """Sets the state that vLLM's scheduler reads: its waiting queue, the token budget, and limits on requests' chunks.

    While an iteration is being scheduled, `limits` has the most tokens of some requests, by request id, and `hidden`
    has the waiting requests that vLLM must not admit. `budget_tokens` is the latest plan's budget. Without `limits`
    (None), vLLM gives running requests their usual tokens, and the plan's waiting calls the rest of the budget.
    """

    def __init__(self, scheduler: Any, facts: VllmFacts, limits: dict[str, int] | None) -> None:
        self.hidden: list[Any] = []
        self.budget_tokens = facts.max_batch_tokens
        self._scheduler = scheduler
        self._facts = facts
        self._limits = limits

    def show(self, plan: Plan, blocked: list[Any]) -> None:
        """Leave in vLLM's queue only the calls that the plan admits, in its order. The others are `hidden`."""
        requests, queue = self._scheduler.requests, self._scheduler.waiting
        shown = [requests[call.call_id] for call, _ in _picks(plan) if call.waits]
        shown += [requests[call.call_id] for call in _backfill(plan) if call.waits]
        shown += blocked
        if len(shown) < len(queue):
            kept = set(map(id, shown))
            self.hidden = [request for request in queue if id(request) not in kept]
        queue.clear()
        queue.extend(shown)

    def limit(self, plan: Plan, running: list[LocalCall], loaded: int = 0) -> None:
        """Set the budget, and limits for calls that get only a part of their tokens.

        The budget has a token more for each of the `loaded` calls, which no plan has: the call begins with this token,
        and the next plan has it. Without limits, vLLM also runs the running calls that the plan leaves out. The budget
        has a token more for each of them too, or they would take the tokens of the plan's decodes.
        """
        budget_tokens = self._facts.max_batch_tokens
        if plan.budget_tokens is not None:
            budget_tokens = min(budget_tokens, max(0, plan.budget_tokens) + loaded)
        if self._limits is None:
            named = _named(plan)
            unplanned = sum(id(call) not in named for call in running)
            budget_tokens = min(self._facts.max_batch_tokens, budget_tokens + unplanned)
        else:
            self._limits.update(self._cut(plan, running, budget_tokens))
        self.budget_tokens = self._scheduler.max_num_scheduled_tokens = budget_tokens

    def give_back(self) -> None:
        """The iteration is scheduled. Give vLLM its queue and its budget back."""
        self._scheduler.waiting.extend(self.hidden)
        self._scheduler.max_num_scheduled_tokens = self._facts.max_batch_tokens
        self.hidden = []
        if self._limits:
            self._limits.clear()

    def _cut(self, plan: Plan, running: list[LocalCall], budget_tokens: int) -> dict[str, int]:
        """Limits for the calls that get only a part of their tokens, and 0 for running calls that get none."""
        limits: dict[str, int] = {}
        picks, go_on = _picks(plan), len(plan.preempt)
        uses_up = budget_tokens <= sum(tokens for _, tokens in picks)
        last = _served_last(picks, running) if uses_up else None
        for call, tokens in picks:
            wanted = call.prompt_tokens + call.output_tokens - call.computed_tokens
            if call.waits:
                wanted -= self._facts.cached_tokens(call)
            else:
                go_on += 1
            if tokens < wanted and call is not last:  # vLLM cuts the last call itself where the budget ends
                limit = self._whole_blocks(call, tokens)
                if limit > 0:
                    limits[call.call_id] = limit
        go_on += sum(not call.waits for call in _backfill(plan))
        if go_on < len(running):
            named = _named(plan)
            limits.update((call.call_id, 0) for call in running if id(call) not in named)
        return limits

    def _whole_blocks(self, call: LocalCall, tokens: int) -> int:
        """The `tokens` of a call, cut at the last block's end if the model needs whole blocks."""
        if self._scheduler.need_mamba_block_aligned_split:  # such models need chunks that end with a block
            block_tokens = self._scheduler.cache_config.block_size
            tokens = (call.computed_tokens + tokens) // block_tokens * block_tokens - call.computed_tokens
        return tokens


def _named(plan: Plan) -> set[int]:
    """The `id()` of each call to which a plan may give tokens."""
    named = {id(call) for call, _ in plan.picks}
    named.update(map(id, plan.backfill))
    return named


def _picks(plan: Plan) -> tuple[tuple[VllmCall, int], ...]:
    return cast("tuple[tuple[VllmCall, int], ...]", plan.picks)


def _backfill(plan: Plan) -> tuple[VllmCall, ...]:
    return cast("tuple[VllmCall, ...]", plan.backfill)


def _served_last(picks: Sequence[tuple[VllmCall, int]], running: Sequence[LocalCall]) -> LocalCall | None:
    """The pick that vLLM serves last: running calls come first, in vLLM's order, then waiting calls in the plan's."""
    for call, _ in reversed(picks):
        if call.waits:
            return call
    picked = {id(call) for call, _ in picks}
    return next((call for call in reversed(running) if id(call) in picked), None)
