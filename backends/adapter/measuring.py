"""Local schedulers that measure how long iterations take, and the cost model that they start with."""

from __future__ import annotations

from plait.policy.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import LocalScheduler, MeasuringScheduler


def measuring(policy: LocalScheduler, costs: CostModel | None) -> MeasuringScheduler | None:
    """`policy` if it measures, else None. It plans by `costs`, if there are any."""
    if not isinstance(policy, MeasuringScheduler):
        return None
    if costs is not None:
        policy.expect(costs)
    return policy
