"""The `slo` local scheduler: iteration SLOs, dynamic chunking, multi-resource batching and hit-ratio groups, composed.

While no call has had an objective lately it plans as `hit_ratio` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.policy.cost_model import CostModel
from plait.policy.scheduling.in_order import HitRatioOrder, plan_in_order
from plait.policy.scheduling.iteration import Iteration, Knowledge
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.outputs import MeanOutputs
from plait.policy.scheduling.pace import Pace, RecentIterations
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from plait.policy.scheduling.preemption_history import PreemptionHistory
from plait.policy.scheduling.slo import Objectives
from plait.policy.scheduling.slo_settings import SloSettings
from plait.policy.scheduling.ttft_slack import TtftSlack


class SloScheduler:
    """A LocalScheduler that measures; `settings` switch its methods."""

    def __init__(self, settings: SloSettings | None = None) -> None:
        self.settings = settings or SloSettings()
        self.model = IterationModel()
        self.iterations = RecentIterations()
        self.preemptions = PreemptionHistory()
        self.outputs = MeanOutputs()
        self.ttft_slack = TtftSlack()
        self.objectives = Objectives(self.settings.default_slo, self.settings.execution, self.settings.jct_slack)
        self.hit_ratio = HitRatioOrder()
        self._started_long: list[LocalCall] = []
        self._paused_s: float | None = None

    def expect(self, costs: CostModel) -> None:
        """The engine's iteration times are known."""
        self.model.expect(costs)

    def observe(self, duration_s: float, work: Sequence[tuple[int, int]]) -> None:
        """An iteration is over; `work` is (new tokens, context tokens) of each of its calls."""
        self.model.on_iteration(duration_s, work)
        self.iterations.on_iteration(duration_s, work)
        self.preemptions.on_iteration(work)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The next iteration's plan."""
        ended = self.preemptions.on_plan(now_s, waiting, running)
        self.outputs.on_ended(ended)
        self.objectives.follow(now_s, running, ended)
        self.hit_ratio.settle(waiting)
        self.ttft_slack.on_plan(now_s, running)
        if self._started_long:
            present = set(running)
            self._started_long = [call for call in self._started_long if call in present]
        slack_s = self.ttft_slack.quartile_s(now_s) if self.settings.spare_share else None
        if slack_s is None and not self.objectives.any(waiting, running):
            return plan_in_order(waiting, running, facts, self.hit_ratio.turns)
        iteration = Iteration(self._knowledge(now_s, facts, slack_s), now_s, waiting, running, facts)
        plan = iteration.plan()
        if not plan.picks and not plan.preempt and (running or waiting):
            return plan_in_order(waiting, running, facts, self.hit_ratio.turns)  # all stand in each other's way
        self._started_long += iteration.started_long
        self.ttft_slack.expect(iteration.spares_s)
        if iteration.paused:
            self._paused_s = now_s
        elif self._paused_s != now_s:
            self._paused_s = None
        return plan

    def _knowledge(self, now_s: float, facts: EngineFacts, slack_s: float | None) -> Knowledge:
        """What an iteration is filled by; decodes may not be left out of two in a row."""
        return Knowledge(
            self.settings,
            self.objectives,
            self.model,
            Pace.of(self.iterations, self.model, self.preemptions, self.outputs, facts.max_batch_tokens),
            self.preemptions,
            slack_s,
            self.hit_ratio,
            self._started_long,
            may_pause=self.settings.pause and self._paused_s in {None, now_s},
        )
