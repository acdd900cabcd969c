"""Deduced objectives as SLO fields on calls, which is what the schedulers inside the engines understand."""

from __future__ import annotations

from typing import Final

from plait.policy.programs.objectives import Deduction
from plait.policy.types import Objective, Slo

LATENCY_SLO: Final = Slo(ttft_s=1.0, tpot_s=0.040)
"""A deduced latency call's: 40 ms a token is what Parrot's evaluation (section 8.1) holds latency-sensitive calls to,
and what nobody reads needs no more; one second to the first token is ours, where no queue should be in front of it.
"""

GROUP_STRETCH: Final = 1.95
"""A task group's common JCT over its slowest call's time alone: batches that give 8.2 times the throughput cost 95 %
more latency (Parrot, section 3), and such batches are what a group is for.
"""


def slo_of(
    deduction: Deduction,
    slowest_s: float,
    *,
    own: Slo | None = None,
    asked: Slo | None = None,
    share_s: float | None = None,
    latency: Slo = LATENCY_SLO,
) -> Slo | None:
    """The objectives of a call, in seconds from when it is ready; None: none (Parrot, section 5.2).

    `own` is what it was annotated with, and wins whole. Else a call that is not a latency call has none. One that is
    has its `share_s` of an end-to-end JCT (see `CriticalPaths`) and the TTFT and TPOT that were `asked` for its output.
    Where nothing explicit reaches it, or the job is late already (`share_s` is nothing or less), a call of a task group
    has the group's common JCT, from `slowest_s`: the longest predicted time, alone on an engine, of the group's calls;
    any other has `latency`.
    """
    if own is not None and own != Slo():
        return own
    if deduction.objective is not Objective.LATENCY:
        return None
    explicit = Slo(
        ttft_s=None if asked is None else asked.ttft_s,
        tpot_s=None if asked is None else asked.tpot_s,
        jct_s=share_s if share_s is not None and share_s > 0 else None,
    )
    if explicit != Slo():
        return explicit
    return latency if deduction.group is None else Slo(jct_s=GROUP_STRETCH * slowest_s)
