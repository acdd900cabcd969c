"""The `slo` local scheduler: iteration SLOs, dynamic chunking, multi-resource batching and hit-ratio groups, composed.

While no call has had an objective lately it plans as `hit_ratio` does. Each of its methods can be switched off, for
ablations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from policy.batching import WINDOW_S
from policy.chunking import Budget, ModelBudget, PivotBudget
from policy.cost_model import CostModel
from policy.in_order import HitRatioOrder, plan_in_order
from policy.iteration import Iteration
from policy.pace import Measurements
from policy.plan import EngineFacts, LocalCall, Plan
from policy.slo import Execution, JctSlack, Objectives
from policy.types import Slo

LONG_TOKENS = 4096
"""DESIGN 4.5: uncached tokens from which on a prompt is long; AccelGen calls prompts of 4K tokens and more long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings:
    """What the scheduler does; the defaults are what ships.

    default_slo: the objectives of calls without any (AccelGen: a TPOT of 0.1875 s, reading speed).
    budget: `model` solves the iteration-time model, `pivot` is equation 6, `engine` is the engine's own maximum.
    order: by T_r, with urgent calls and preemption for them, or by `arrival`.
    selection: `distance` to what is left of compute and KV within `window_s`, or in `order`.
    long_prompts: whether a new one waits until those that run are `completed`, are `prefilled`, or not at all.
    lost: whether a call that cannot meet its TTFT or JCT any more goes behind those that can, or keeps its place.
    execution, jct_slack: how T_e and the slack of a JCT are reckoned (`policy.slo`).
    best_effort_share, lost_share: shares of the budget that are kept for calls without an SLO, or for lost ones only.
    floor_share: of the engine's maximum, for prompts while decodes by themselves take longer than their SLO.
    preempt: for urgent calls, `spare` ones (those without an objective, or that have missed theirs), `any` that stays
      in time itself, or `never`.
    max_preemptions: how often a call makes room for urgent ones at most.
    pause: whether decodes that can wait are left out of an iteration that would be too long for a first token.
    spare_share: an iteration in which nothing is urgent takes at most this share of what recent arrivals could spare of
      their TTFT, if that can be; 0 lets it take as long as the budget allows.
    watermark_blocks: left free for each running decode when a prompt is admitted.
    """

    default_slo: Slo | None = None
    budget: Literal["model", "pivot", "engine"] = "model"
    order: Literal["remaining", "arrival"] = "remaining"
    selection: Literal["distance", "order"] = "distance"
    window_s: float = WINDOW_S
    long_prompts: Literal["until_completed", "until_prefilled", "any"] = "until_prefilled"
    long_tokens: int = LONG_TOKENS
    lost: Literal["demote", "keep"] = "demote"
    execution: Execution = "throughput"
    jct_slack: JctSlack = "whole"
    best_effort_share: float = 0.1
    lost_share: float = 0.02
    floor_share: float = 0.1
    max_preemptions: int = 8
    preempt: Literal["never", "spare", "any"] = "spare"
    pause: bool = True
    spare_share: float = 0.5
    watermark_blocks: int = 2


class SloScheduler:
    """A LocalScheduler that measures; `settings` switch its methods."""

    def __init__(self, settings: SloSettings | None = None) -> None:
        self.settings = settings or SloSettings()
        self.measurements = Measurements()
        self.objectives = Objectives(self.settings.default_slo, self.settings.execution, self.settings.jct_slack)
        self.hit_ratio = HitRatioOrder()
        self._started_long: list[LocalCall] = []
        self._paused_s: float | None = None
        self._spares_s: dict[LocalCall, float] = {}

    def expect(self, costs: CostModel) -> None:
        """The engine's iteration times are known."""
        self.measurements.expect(costs)

    def observe(self, duration_s: float, work: Sequence[tuple[int, int]]) -> None:
        """An iteration is over; `work` is (new tokens, context tokens) of each of its calls."""
        self.measurements.observe(duration_s, work)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The next iteration's plan."""
        ended = self.measurements.follow(now_s, waiting, running)
        self.objectives.follow(now_s, running, ended)
        self.hit_ratio.settle(waiting)
        for call in [call for call in running if call in self._spares_s] if self._spares_s else ():
            self.measurements.spared(now_s, self._spares_s.pop(call))
        if self._started_long:
            present = set(running)
            self._started_long = [call for call in self._started_long if call in present]
        expected = self.settings.spare_share and self.measurements.spare_s(now_s) is not None
        if not expected and not self.objectives.any(waiting, running):
            return plan_in_order(waiting, running, facts, self.hit_ratio.turns)
        iteration = Iteration(self, now_s, waiting, running, facts)
        plan = iteration.plan()
        if not plan.picks and not plan.preempt and (running or waiting):
            return plan_in_order(waiting, running, facts, self.hit_ratio.turns)  # all stand in each other's way
        self._started_long += iteration.started_long
        self._spares_s = iteration.spares_s
        if iteration.paused:
            self._paused_s = now_s
        elif self._paused_s != now_s:
            self._paused_s = None
        return plan

    def may_pause(self, now_s: float) -> bool:
        """Whether decodes may be left out of an iteration now: not of two in a row."""
        return self.settings.pause and self._paused_s in {None, now_s}

    def runs_long(self, call: LocalCall) -> bool:
        """Whether a running call was started as a long prompt."""
        return call in self._started_long

    def new_budget(self, max_tokens: int) -> Budget:
        """An empty iteration's."""
        measured = self.measurements
        if self.settings.budget == "model" and measured.costs is not None:
            return ModelBudget(max_tokens, measured.costs)
        return PivotBudget(max_tokens, None if self.settings.budget == "engine" else measured.pivot)
