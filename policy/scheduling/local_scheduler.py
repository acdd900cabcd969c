"""The local schedulers by name. A local scheduler decides how many tokens each call computes in the next iteration.

A local scheduler is a pure object; every engine adapter drives it with `plan`. `slo` is the default. The others run
calls in a fixed order, as other engines do. See docs/design/local-scheduler.md.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.policy.scheduling.in_order import Fcfs, HitRatio, LongestPrefix
from plait.policy.scheduling.lines import LinesLast
from plait.policy.scheduling.plan import LocalScheduler
from plait.policy.scheduling.slo_scheduler import SloScheduler

SCHEDULERS: dict[str, Callable[[], LocalScheduler]] = {
    "fcfs": Fcfs,
    "hit_ratio": HitRatio,
    "longest_prefix": LongestPrefix,
    "slo": lambda: LinesLast(SloScheduler()),
}
"""The local schedulers by their names in the configuration."""
