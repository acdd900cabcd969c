"""A local scheduler of a user's own: it makes another one's plans, and pulls single levers by force.

Engines import it by `forced_levers:over`, with this folder on their path.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec

from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import EngineFacts, IterationWork, LocalCall, LocalScheduler, MeasuringScheduler, Plan

AHEAD: Final = "plans an iteration while another is computed"
"""What the engine's log says once that was so."""


class LeverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By default none is forced.

    order: `reverse` admits the latest arrival first.
    budget_tokens: the most tokens of an iteration. chunk_tokens: the most tokens of one prompt in an iteration.
    hold_back_iterations: each waiting call is held back for this many iterations while others run.
    preempt_every_iterations: every Nth iteration preempts the running call with the most output.
    """

    order: Literal["arrival", "reverse"] = "arrival"
    budget_tokens: int | None = None
    chunk_tokens: int | None = None
    hold_back_iterations: int = 0
    preempt_every_iterations: int = 0


def over(scheduler: str = "slo", **levers: Any) -> ForcedLevers:
    """Levers over Plait's scheduler of this name."""
    return ForcedLevers(SCHEDULERS[scheduler](), msgspec.convert(levers, LeverSettings))


class ForcedLevers:
    """Changes the plans of an inner scheduler as the settings say."""

    def __init__(self, inner: LocalScheduler, settings: LeverSettings) -> None:
        self._inner = inner
        self._settings = settings
        self._iterations = 0
        self._ahead = False
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
        if not self._ahead and facts.in_flight is not None:
            self._ahead = True
            sys.stderr.write(f"{AHEAD}\n")
            sys.stderr.flush()
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
