"""The local scheduler: which calls of one engine compute how many tokens in its next iteration.

A local scheduler is a pure object; every engine adapter drives it with `plan`. `SCHEDULERS` has them by name. `slo` is
the one that ships by default. The others run calls in an order, as other engines do. See
docs/design/local-scheduler.md.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.policy.scheduling.in_order import MAX_BACKFILL_CALLS, Fcfs, HitRatio, LongestPrefix
from plait.policy.scheduling.plan import EngineFacts, LocalCall, LocalScheduler, MeasuringScheduler, Plan
from plait.policy.scheduling.slo_scheduler import SloScheduler
from plait.policy.scheduling.slo_settings import SloSettings

__all__ = [
    "MAX_BACKFILL_CALLS",
    "SCHEDULERS",
    "EngineFacts",
    "Fcfs",
    "HitRatio",
    "LocalCall",
    "LocalScheduler",
    "LongestPrefix",
    "MeasuringScheduler",
    "Plan",
    "SloScheduler",
    "SloSettings",
]

SCHEDULERS: dict[str, Callable[[], LocalScheduler]] = {
    "fcfs": Fcfs,
    "hit_ratio": HitRatio,
    "longest_prefix": LongestPrefix,
    "slo": SloScheduler,
}
"""The local schedulers by the name that configuration uses."""
