"""The reserve: tokens of an iteration that calls with objectives leave to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.waiting import Sorted

MISSED_SHARE = 0.02
"""Ours: share of the budget that is reserved where all others have missed their SLO."""

Select = Callable[[Moment, Batch, Sequence[Candidate]], None]
"""Adds the candidates that are to share what is left."""


def reserve_tokens(moment: Moment, batch: Batch, others: Sequence[Candidate], found: Sorted) -> int:
    """Tokens reserved for best-effort calls and calls that missed their SLO; `others` are those that run."""
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
