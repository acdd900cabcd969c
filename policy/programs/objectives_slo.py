"""Turns deduced objectives into SLO fields on calls, which the schedulers inside the engines understand."""

from __future__ import annotations

from typing import Final

from plait.policy.programs.objectives import Deduction
from plait.policy.types import Objective, Slo

LATENCY_SLO: Final = Slo(ttft_s=1.0, tpot_s=0.040)
"""The SLO of a deduced latency call. Parrot's evaluation (section 8.1) holds latency-sensitive calls to 40 ms a token,
and an intermediate result, which nobody reads, needs no less. One second to the first token is ours: such a call should
not have to queue.
"""

GROUP_STRETCH: Final = 1.95
"""A task group's common JCT over its slowest call's time alone. A group should run in large batches, and batches that
give 8.2 times the throughput cost 95 % more latency (Parrot, section 3).
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
    """The objectives of a call, in seconds from when it is ready; None if it has none (Parrot, section 5.2).

    `own` is the call's annotation; it wins as a whole. Otherwise only latency calls have objectives. A latency call has
    its `share_s` of an end-to-end JCT (see `CriticalPaths`), and the TTFT and TPOT `asked` for its output. If nothing
    explicit reaches it, or the job is late already (`share_s` is 0 or less), it has a default. For a call of a task
    group that is the group's common JCT, from `slowest_s`: the longest predicted time of the group's calls, each alone
    on an engine. For any other latency call it is `latency`.
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
