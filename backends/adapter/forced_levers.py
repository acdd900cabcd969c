"""Changes the plans of another local scheduler as its settings say, for tests on real engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.backends.adapter.scheduler_settings import LeverSettings, SchedulerSettings
from plait.policy.cost_model import CostModel
from plait.policy.scheduling.iteration_work import IterationWork
from plait.policy.scheduling.local_scheduler import (
    SCHEDULERS,
    EngineFacts,
    LocalCall,
    LocalScheduler,
    MeasuringScheduler,
    Plan,
)


def local_scheduler(settings: SchedulerSettings) -> LocalScheduler:
    """The local scheduler of the settings, wrapped in `ForcedLevers` if they force any lever."""
    policy = SCHEDULERS[settings.scheduler]()
    return policy if settings.levers == LeverSettings() else ForcedLevers(policy, settings.levers)


class ForcedLevers:
    """A LocalScheduler that changes the plans of an inner one."""

    def __init__(self, inner: LocalScheduler, settings: LeverSettings) -> None:
        self._inner = inner
        self._settings = settings
        self._iterations = 0
        self._held_until: dict[int, int] = {}
        self._measuring = inner if isinstance(inner, MeasuringScheduler) else None

    def expect(self, costs: CostModel) -> None:
        """Pass the costs on to the inner scheduler, if it measures."""
        if self._measuring is not None:
            self._measuring.expect(costs)

    def observe(self, duration_s: float, work: IterationWork) -> None:
        """Pass the iteration on to the inner scheduler, if it measures."""
        if self._measuring is not None:
            self._measuring.observe(duration_s, work)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The inner scheduler's plan for the calls that are not held back, with the forced changes."""
        self._iterations += 1
        shown = self._shown(waiting) if running else list(waiting)
        if self._settings.order == "reverse":
            shown.reverse()
        plan = self._inner.plan(now_s, shown, running, facts)
        return self._limited(self._preempted(plan, running))

    def _shown(self, waiting: Sequence[LocalCall]) -> list[LocalCall]:
        """The waiting calls that have been held back for long enough."""
        hold = self._settings.hold_back_iterations
        if not hold:
            return list(waiting)
        until = {id(call): self._held_until.get(id(call), self._iterations + hold) for call in waiting}
        self._held_until = until
        return [call for call in waiting if until[id(call)] <= self._iterations]

    def _preempted(self, plan: Plan, running: Sequence[LocalCall]) -> Plan:
        every = self._settings.preempt_every_iterations
        if plan.preempt or not every or self._iterations % every:
            return plan
        victim = max(running, key=lambda call: call.output_tokens, default=None)
        if victim is None or victim.output_tokens == 0:
            return plan
        return replace(
            plan,
            preempt=(victim,),
            picks=tuple(pick for pick in plan.picks if pick[0] is not victim),
            backfill=tuple(call for call in plan.backfill if call is not victim),
        )

    def _limited(self, plan: Plan) -> Plan:
        chunk, budget = self._settings.chunk_tokens, self._settings.budget_tokens
        if chunk is not None:
            picks = tuple((call, min(tokens, chunk)) for call, tokens in plan.picks)
            plan = replace(plan, picks=picks, backfill=())  # the chunk limit does not apply to backfill
        return plan if budget is None else replace(plan, budget_tokens=budget)
