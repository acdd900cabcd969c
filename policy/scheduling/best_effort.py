"""Fills the rest of an iteration with calls that have missed their SLO and with best-effort calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import ceil

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment, waiting_candidate
from plait.policy.scheduling.plan import LocalCall
from plait.policy.scheduling.selection import select_in_order
from plait.policy.scheduling.shared_prefixes import follows, startable
from plait.policy.scheduling.waiting import Ranked

PASS_RATIO = 32.0
"""If a call that missed its SLO does not fit, only calls with at least 1/32 of its response ratio may bypass it. The
ratio grows as a call waits, so no call starves.
"""

MOST_MISSED_MISFITS = 8
"""The search for calls that missed their SLO ends after more misfits than this."""


def add_best_effort(
    moment: Moment, batch: Batch, running: Sequence[Candidate], missed: Sequence[Ranked], turns: Iterator[LocalCall]
) -> Iterator[LocalCall]:
    """Add calls that missed their SLO, then best-effort calls. In both groups, running calls go first.

    `turns` are the waiting best-effort calls. Returns the waiting calls that are left, in order.
    """
    if not batch.preempted:
        return _fill(moment, batch, running, missed, turns)
    # Admit no call: the preempted calls' blocks are for the calls that lacked blocks.
    best_effort = [one for one in running if not one.missed_slo]
    _reserve(moment, batch, wanted=bool(best_effort))
    select_in_order(moment, batch, [one for one in running if one.missed_slo])
    batch.reserve_tokens = 0
    select_in_order(moment, batch, best_effort)
    return chain(turns, (one.call for _, one in missed))


def _fill(
    moment: Moment, batch: Batch, running: Sequence[Candidate], missed: Sequence[Ranked], turns: Iterator[LocalCall]
) -> Iterator[LocalCall]:
    """If the best-effort head lacks blocks, no waiting call may bypass it, unless it waits for a leader."""
    head = next(turns, None)
    first = [] if head is None else [waiting_candidate(moment, head)]
    best_effort = [one for one in running if not one.missed_slo]
    _reserve(moment, batch, wanted=bool(first or best_effort))
    select_in_order(moment, batch, [one for one in running if one.missed_slo])
    if not any(batch.left_tokens and not batch.has_blocks(one) for one in startable(moment, batch, first)):
        _add_missed(moment, batch, missed)
    batch.reserve_tokens = 0
    select_in_order(moment, batch, best_effort)
    left: Iterator[LocalCall] = turns
    for candidate in startable(moment, batch, chain(first, (waiting_candidate(moment, call) for call in turns))):
        if not _add(batch, candidate):
            left = chain((candidate.call,), turns)
            break
    return chain(left, (one.call for _, one in missed))


def _reserve(moment: Moment, batch: Batch, *, wanted: bool) -> None:
    """Reserve the best-effort calls' share of the tokens left."""
    if wanted:
        batch.reserve_tokens = ceil(moment.settings.best_effort_share * batch.left_tokens)


def _add_missed(moment: Moment, batch: Batch, missed: Sequence[Ranked]) -> None:
    """Add calls in order. `PASS_RATIO` and `MOST_MISSED_MISFITS` limit which calls may bypass a call that misfits."""
    misfits, least_ratio = 0, 0.0
    for ratio, candidate in missed:
        if ratio < least_ratio or misfits > MOST_MISSED_MISFITS:
            return
        if follows(moment, batch, candidate):
            continue
        if not _add(batch, candidate):
            misfits += 1
            least_ratio = max(least_ratio, ratio / PASS_RATIO)


def _add(batch: Batch, candidate: Candidate) -> bool:
    tokens = batch.fit(candidate)
    if tokens:
        batch.add(candidate, tokens)
    return tokens > 0
