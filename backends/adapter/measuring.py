"""Local schedulers that measure how long iterations take, and what they can be told before the first."""

from __future__ import annotations

from plait.policy.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import LocalScheduler, MeasuringScheduler


def measuring(policy: LocalScheduler, costs: CostModel | None) -> MeasuringScheduler | None:
    """The scheduler, if it is one that measures, and None else; it expects `costs` until it has measured."""
    if not isinstance(policy, MeasuringScheduler):
        return None
    if costs is not None:
        policy.expect(costs)
    return policy
