"""Lines of batches in an engine: they get what a local scheduler leaves of an iteration, and little beside other calls.

Nobody waits for a line. Its decodes run as those of other calls, because they hardly lengthen an iteration. Its prompt
is computed after all else, and while others call, only as far as the iteration takes at most `SLOWDOWN` times as long.
Some engines take longer than that for any iteration with a prompt. There a part of a line's prompt is computed once the
iterations before have saved enough time for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from plait.policy.costs.cost_model import CostModel
from plait.policy.order import ONLINE_S
from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.chunking import model_budget
from plait.policy.scheduling.moment import DECODE_TOKENS
from plait.policy.scheduling.plan import (
    EngineFacts,
    IterationWork,
    LocalCall,
    Plan,
    ready,
)
from plait.policy.scheduling.preemption import WATERMARK_BLOCKS
from plait.policy.scheduling.slo_scheduler import SloScheduler

SLOWDOWN: Final = 1.06
"""How much longer iterations of other calls may take because of lines."""

LEAST_TOKENS: Final = 16
"""A part of a line's prompt has at least so many tokens, unless it is the last one."""


class LinesLast:
    """A `MeasuringScheduler` that plans the other calls as `slo` does, and then the prompts of lines."""

    def __init__(self, others: SloScheduler) -> None:
        self.model = others.model
        self._others = others
        self._lines: dict[LocalCall, None] = {}
        self._online_s = -inf  # when another call was last here
        self._paid_s = -inf  # when an iteration last took longer than the bound

    def expect(self, costs: CostModel) -> None:
        """Use this model of the engine's iteration times."""
        self._others.expect(costs)

    def observe(self, duration_s: float, work: IterationWork) -> None:
        self._others.observe(duration_s, work)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        for call in waiting:
            if call.is_line:
                self._lines[call] = None
            else:
                self._online_s = now_s
        if not self._lines:
            return self._others.plan(now_s, waiting, running, facts)
        present = {*waiting, *running}
        lines = self._lines = {line: None for line in self._lines if line in present}
        if len(lines) < len(present):
            self._online_s = now_s
        elif now_s - self._online_s > ONLINE_S:
            return self._others.plan(now_s, waiting, running, facts)
        prompts = [line for line in running if line in lines and line.computed_tokens < line.prompt_tokens]
        begun = set(prompts)
        others = [call for call in waiting if call not in lines]
        plan = self._others.plan(now_s, others, [call for call in running if call not in begun], facts)
        if not (plan.preempt or plan.backfill):  # otherwise others wait for what is left
            prompts += ready([line for line in waiting if line in lines], facts)
            plan = self._with(plan, prompts, now_s, running, facts)
        if plan.picks or plan.preempt or not (running or waiting):
            return plan
        return self._others.plan(now_s, waiting, running, facts)  # lines block each other, or others

    def _with(
        self, plan: Plan, prompts: Sequence[LocalCall], now_s: float, running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The plan with parts of the lines' `prompts`, in their order."""
        runs = set(running)
        most_tokens = facts.max_batch_tokens if plan.budget_tokens is None else plan.budget_tokens
        batch = Batch(model_budget(most_tokens, self.model), facts, facts.max_running_calls - len(running))
        for call, tokens in plan.picks:
            if not call.is_line:
                batch.add(_candidate(call, call not in runs, facts), tokens)
        without_s = batch.budget.time_s()
        for call, tokens in plan.picks:
            if call.is_line:
                batch.add(_candidate(call, waits=False, facts=facts), tokens)
        batch.unreserved_blocks -= WATERMARK_BLOCKS * len(running)
        for candidate in (_candidate(line, line not in runs, facts) for line in prompts):
            self._limit(batch, candidate, without_s, now_s)
            tokens = batch.fit(candidate)
            if tokens < min(LEAST_TOKENS, candidate.tokens):
                break
            batch.add(candidate, tokens)
        if len(batch.picks) == len(plan.picks):
            return plan
        return Plan((), tuple(batch.picks.items()), budget_tokens=batch.budget.tokens)

    def _limit(self, batch: Batch, candidate: Candidate, without_s: float, now_s: float) -> None:
        """Bound the iteration's time for the first line's prompt in it."""
        budget, least = batch.budget, min(LEAST_TOKENS, candidate.tokens)
        if budget.limit_s < inf:
            return
        has_prompts = any(tokens > DECODE_TOKENS for tokens in batch.picks.values())
        before_s, least_s = budget.time_s(), budget.time_s(least, candidate.context_tokens)
        budget.limit_s = without_s if has_prompts else SLOWDOWN * without_s
        if not without_s:
            budget.limit_s = max(budget.least_s(candidate.context_tokens), least_s)
        elif least_s > budget.limit_s and not has_prompts:
            pays_s = (least_s - before_s) / (SLOWDOWN - 1)
            if now_s == self._paid_s or now_s - self._paid_s >= pays_s:  # the same moment may be planned again
                budget.limit_s, self._paid_s = least_s, now_s


def _candidate(call: LocalCall, waits: bool, facts: EngineFacts) -> Candidate:
    cached_tokens = facts.cached_tokens(call) if waits else call.computed_tokens
    return Candidate(call, call.prompt_tokens + call.output_tokens - cached_tokens, cached_tokens, waits)
