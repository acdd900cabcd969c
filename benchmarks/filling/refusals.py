"""Whether `Retry-After` is true, in virtual time: three tenants, of which one sends twenty times as much, at 1.9 times
what the fleet can take.

A refused call is told how long the calls of its tenant take that wait already. That is compared with the time until the
last of these was sent. Both count up to the longest time that a client is told.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.filling.systems import ADMISSION, NONE, FleetSize, systems
from benchmarks.filling.tenants import WEIGHTS
from benchmarks.filling.workloads import workloads
from benchmarks.placing.workloads import chat
from plait.gateway.asgi import MOST_RETRY_AFTER_S
from plait.lab.simulation.simulate import Simulation

CHAT: Final = "chat"
"""A workload besides those of full fleets."""
LOAD: Final = 1.9
SATURATION_CALLS: Final = 800
LEAST, MOST = 0.8, 1.25
"""Where the median of what is true over what was said has to be."""
WITHIN, SHARE = 2.0, 0.7
"""So large a share is within this factor."""


@dataclass(frozen=True, slots=True)
class Truth:
    """Of a run: the median of the true time over what was said, and the share of refusals within a factor of two."""

    refusals: int
    ratio: float
    within: float

    @property
    def holds(self) -> bool:
        """Whether `Retry-After` is true. Without a refusal it is."""
        return not self.refusals or (LEAST <= self.ratio <= MOST and self.within >= SHARE)


def measure(workload: str, traces: Path, seconds: float, seed: int, engines: int) -> Truth:
    """Run a workload with admission as it ships."""
    make, made = {CHAT: chat, **workloads(traces)}[workload], systems(FleetSize(engines=engines))
    _, saturated = made[NONE](seed)
    records = saturated.run(make(SATURATION_CALLS, inf, seed))
    rate = LOAD * SATURATION_CALLS / max(record.finished_s for record in records)
    dice = random.Random(f"refusals {seed}")
    tenants = dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=round(rate * seconds))
    calls = make(len(tenants), rate, seed)
    _, simulation = made[ADMISSION](seed)
    simulation.run([replace(call, tenant=tenant) for call, tenant in zip(calls, tenants, strict=True)])
    ratios = _ratios(simulation)
    if not ratios:
        return Truth(0, 1.0, 1.0)
    return Truth(len(ratios), median(ratios), sum(1 / WITHIN <= one <= WITHIN for one in ratios) / len(ratios))


def _ratios(simulation: Simulation) -> Sequence[float]:
    """For each refusal, what was true over what was said."""
    ratios = []
    for refused in simulation.refused:
        at_s = refused.finished_s
        waited = [
            record.sent_s - at_s
            for record in simulation.records
            if record.tenant == refused.tenant and record.arrived_s <= at_s < record.sent_s
        ]
        if waited:
            ratios.append(min(max(waited), MOST_RETRY_AFTER_S) / min(refused.retry_after_s, MOST_RETRY_AFTER_S))
    return ratios
