"""Sets vLLM's state for one iteration so that vLLM's own `schedule()` follows a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from plait.backends.vllm.calls import SchedulerFacts, VllmCall
from plait.policy.scheduling.local_scheduler import LocalCall, Plan


class Levers:
    """Sets the state that vLLM's scheduler reads: its waiting queue, the token budget, and limits on requests' chunks.

    While an iteration is being scheduled, `limits` has the chunk limits by request id, and `hidden` has the waiting
    requests that are held back. `budget_tokens` is the latest plan's budget.
    """

    def __init__(self, scheduler: Any, facts: SchedulerFacts) -> None:
        self.limits: dict[str, int] = {}
        self.hidden: list[Any] = []
        self.budget_tokens = facts.max_batch_tokens
        self._scheduler = scheduler
        self._facts = facts

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

    def limit(self, plan: Plan, running: list[LocalCall]) -> None:
        """Set the budget, and limits for calls that get only a part of their tokens."""
        budget_tokens = self._facts.max_batch_tokens
        if plan.budget_tokens is not None:
            budget_tokens = min(budget_tokens, max(0, plan.budget_tokens))
        self.budget_tokens = self._scheduler.max_num_scheduled_tokens = budget_tokens
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
                self._limit_call(call, tokens)
        go_on += sum(not call.waits for call in _backfill(plan))
        if go_on < len(running):
            self._hold(plan, running)

    def give_back(self) -> None:
        """The iteration is scheduled. Give vLLM its queue and its budget back."""
        self._scheduler.waiting.extend(self.hidden)
        self._scheduler.max_num_scheduled_tokens = self._facts.max_batch_tokens
        self.limits, self.hidden = {}, []

    def _hold(self, plan: Plan, running: list[LocalCall]) -> None:
        """Give no tokens to running calls that are not in the plan."""
        named = {id(call) for call, _ in plan.picks}
        named.update(map(id, plan.backfill))
        self.limits.update((call.call_id, 0) for call in running if id(call) not in named)

    def _limit_call(self, call: LocalCall, tokens: int) -> None:
        if self._scheduler.need_mamba_block_aligned_split:  # such models need chunks that end with a block
            block_tokens = self._scheduler.cache_config.block_size
            tokens = (call.computed_tokens + tokens) // block_tokens * block_tokens - call.computed_tokens
        if tokens > 0:
            self.limits[call.call_id] = tokens


def _picks(plan: Plan) -> tuple[tuple[VllmCall, int], ...]:
    """A plan's picks, with this adapter's call type."""
    return cast("tuple[tuple[VllmCall, int], ...]", plan.picks)


def _backfill(plan: Plan) -> tuple[VllmCall, ...]:
    return cast("tuple[VllmCall, ...]", plan.backfill)


def _served_last(picks: Sequence[tuple[VllmCall, int]], running: Sequence[LocalCall]) -> LocalCall | None:
    """The pick that vLLM serves last. It serves running calls in its own order, then waiting calls in the plan's."""
    for call, _ in reversed(picks):
        if call.waits:
            return call
    picked = {id(call) for call, _ in picks}
    return next((call for call in reversed(running) if id(call) in picked), None)
