"""The `slo` local scheduler: iteration SLOs, dynamic chunking, multi-resource batching and hit-ratio groups, composed.

While no call has had an objective lately it plans as `hit_ratio` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.policy.cost_model import CostModel
from plait.policy.scheduling.in_order import HitRatioOrder, plan_in_order
from plait.policy.scheduling.iteration import Iteration, Knowledge
from plait.policy.scheduling.pace import Measurements
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from plait.policy.scheduling.slo import Objectives
from plait.policy.scheduling.slo_settings import SloSettings


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
        iteration = Iteration(self._knowledge(now_s), now_s, waiting, running, facts)
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

    def _knowledge(self, now_s: float) -> Knowledge:
        """What an iteration is filled by; decodes may not be left out of two in a row."""
        may_pause = self.settings.pause and self._paused_s in {None, now_s}
        long_calls = self._started_long
        return Knowledge(self.settings, self.objectives, self.measurements, self.hit_ratio, long_calls, may_pause)
