"""The reserve: tokens of an iteration that are kept for best-effort calls and calls that missed their SLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.waiting import Sorted

MISSED_SHARE = 0.02
"""Ours: share of the budget that is reserved where there are no best-effort calls, only calls that missed their SLO."""

Select = Callable[[Moment, Batch, Sequence[Candidate]], None]
"""Adds candidates to what is left of the batch."""


def reserve_tokens(moment: Moment, batch: Batch, others: Sequence[Candidate], found: Sorted) -> int:
    """Tokens reserved for best-effort calls and calls that missed their SLO; `others` are the running ones of both."""
    if found.best_effort or any(moment.objectives.of(one.call) is None for one in others):
        share = moment.settings.best_effort_share
    elif others or found.missed:
        share = MISSED_SHARE
    else:
        return 0
    return ceil(share * batch.left_tokens)


def return_reserve(moment: Moment, batch: Batch, candidates: Sequence[Candidate], select: Select) -> None:
    """Return the unused reserve, first to the calls it truncated, then to those it left out."""
    picks = batch.picks
    for candidate in candidates:
        if picks.get(candidate.call, candidate.tokens) < candidate.tokens:
            batch.extend(candidate)
    select(moment, batch, [one for one in candidates if one.call not in picks and one.call not in batch.preempted])
