"""Turns deduced objectives into the SLO fields of calls, which the local schedulers understand."""

from __future__ import annotations

from typing import Final

from plait.policy.programs.objectives import Deduction
from plait.policy.types import NO_SLO, Objective, Slo

LATENCY_SLO: Final = Slo(ttft_s=1.0, tpot_s=0.040)
"""The SLO of a deduced latency call. Parrot's evaluation (section 8.1) limits latency-sensitive calls to 40 ms a token.
No person reads an intermediate result, so no tighter TPOT is needed. One second to the first token is ours: such a call
should not have to queue.
"""

GROUP_STRETCH: Final = 1.95
"""The ratio of a task group's common JCT to the time of its slowest call alone on an engine. A group should run in
large batches. Batches with 8.2 times the throughput have 95 % more latency (Parrot, section 3).
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
    """The SLO of a call, in seconds from when it is ready; None if it has none (Parrot, section 5.2).

    `own` is the call's annotation. If it states any time, it is the whole SLO. Otherwise only latency calls have an
    SLO: the call's `share_s` of an end-to-end JCT (see `CriticalPaths`), and the TTFT and TPOT `asked` for its output.
    A share of 0 or less does not count: the job is late already.

    A latency call without such times has a default. In a task group, the default is the group's common JCT. It follows
    from `slowest_s`, the longest predicted time of the group's calls, each alone on an engine. For any other latency
    call, the default is `latency`.
    """
    if own is not None and own != NO_SLO:
        return own
    if deduction.objective is not Objective.LATENCY:
        return None
    explicit = Slo(
        ttft_s=None if asked is None else asked.ttft_s,
        tpot_s=None if asked is None else asked.tpot_s,
        jct_s=share_s if share_s is not None and share_s > 0 else None,
    )
    if explicit != NO_SLO:
        return explicit
    return latency if deduction.group is None else Slo(jct_s=GROUP_STRETCH * slowest_s)
