"""Gives a cost model to a local scheduler that measures how long iterations take."""

from __future__ import annotations

from plait.policy.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import LocalScheduler, MeasuringScheduler


def measuring(policy: LocalScheduler, costs: CostModel | None) -> MeasuringScheduler | None:
    """Returns `policy` if it measures, else None. It starts with `costs`, if given."""
    if not isinstance(policy, MeasuringScheduler):
        return None
    if costs is not None:
        policy.expect(costs)
    return policy
