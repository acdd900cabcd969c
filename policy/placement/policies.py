"""The placement policies by their names in the configuration.

A policy chooses the engine of a call. See docs/placement.md.
"""

from __future__ import annotations

from plait.policy.placement.baselines import least_outstanding, round_robin
from plait.policy.placement.e2 import e2
from plait.policy.placement.least_delay import least_delay
from plait.policy.placement.situation import Policy

POLICIES: dict[str, Policy] = {
    "plait": least_delay,
    "e2": e2,
    "round_robin": round_robin,
    "least_outstanding": least_outstanding,
}
