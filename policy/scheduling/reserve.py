"""The reserve: the tokens of an iteration that are kept for best-effort calls and calls that missed their SLO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.waiting import Sorted

MISSED_SHARE = 0.02
"""Ours: the reserve, as a share of the tokens left, if calls have missed their SLO and no call is best-effort."""

Select = Callable[[Moment, Batch, Iterable[Candidate]], None]
"""Adds candidates to a batch, as far as they fit."""


def reserve_tokens(moment: Moment, batch: Batch, others: Sequence[Candidate], found: Sorted) -> int:
    """The reserve, in tokens. `others` are the running prefills that are best-effort or have missed their SLO."""
    if found.best_effort or any(moment.objectives.of(one.call) is None for one in others):
        share = moment.settings.best_effort_share
    elif others or found.missed:
        share = MISSED_SHARE
    else:
        return 0
    return ceil(share * batch.left_tokens)


def return_reserve(moment: Moment, batch: Batch, candidates: Sequence[Candidate], select: Select) -> None:
    """Give the unused reserve first to truncated candidates, then to candidates that were left out."""
    picks = batch.picks
    for candidate in candidates:
        if picks.get(candidate.call, candidate.tokens) < candidate.tokens:
            batch.extend(candidate)
    select(moment, batch, [one for one in candidates if one.call not in picks and one.call not in batch.preempted])
