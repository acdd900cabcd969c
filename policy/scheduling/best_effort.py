"""The rest of an iteration, for calls that have missed their SLO and best-effort calls.

A part of the tokens is reserved for these calls (the reserve). A time limit ends the iteration in time for the calls
that arrive during it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from math import ceil, inf

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment, waiting_candidate
from plait.policy.scheduling.plan import LocalCall
from plait.policy.scheduling.selection import select_in_order
from plait.policy.scheduling.shared_prefixes import hold_follower, startable
from plait.policy.scheduling.waiting import Ranked, Sorted

LEAST_ITERATIONS = 3.2
"""Ours: a shortened iteration lasts at least this many shortest iterations, so overhead is less than a third of it."""

HOPELESS = 0.25
"""Ours: while fewer of the arrivals than this could be in time, their slack limits nothing."""


def shortest_prompt_s(moment: Moment, batch: Batch) -> float:
    """The time of the shortest iteration with a prompt. `batch` has only the running decodes."""
    return batch.budget.least_s(max((one.context_tokens for one in moment.prefills), default=0))


def backlog_limit_s(moment: Moment, prompt_s: float, missed: Collection[Ranked]) -> float:
    """The time limit while missed and best-effort calls are added: a share of the arrivals' TTFT slack.

    An iteration may always last `LEAST_ITERATIONS` shortest ones, and `prompt_s`, the shortest one with a prompt. The
    limit is infinite if no arrivals are expected, or if hardly any could be in time: an arrival waits for the rest of
    an iteration, and for the whole of another if the engine plans ahead. While calls wait that have missed their SLO,
    arrivals come too late to be given the time of another.
    """
    slack_s, ahead = moment.arrivals_slack_s, moment.facts.in_flight is not None
    if slack_s is None:
        return inf
    least_s = max(LEAST_ITERATIONS * moment.pace.shortest_s, prompt_s)
    if slack_s < (ahead + HOPELESS) * least_s:
        return inf
    return max(moment.settings.slack_shares[ahead and not missed] * slack_s, least_s)


def limit_backlog(batch: Batch, limit_s: float, reserve_tokens: int) -> None:
    """End the iteration within `limit_s`, but allow a part of the reserve beyond it.

    The allowed share of the reserve is `limit_s` / t, at most 1. t is the iteration's time if the batch takes all the
    tokens that still fit.
    """
    if limit_s < batch.budget.limit_s:
        all_s = batch.budget.time_s(batch.left_tokens)
        batch.limit_backlog(limit_s, ceil(reserve_tokens * min(1.0, limit_s / all_s)) if all_s else reserve_tokens)


MISSED_SHARE = 0.02
"""Ours: the reserve, as a share of the tokens left, if calls have missed their SLO and no call is best-effort."""

Select = Callable[[Moment, Batch, Iterable[Candidate]], None]
"""Adds the candidates that fit to a batch."""


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

    `turns` are the waiting best-effort calls. Returns the waiting calls that are left, in order. If the first of
    `turns` lacks blocks and does not wait for a leader, no waiting call may bypass that call.
    """
    admits = not batch.preempted  # the preempted calls' blocks are for the calls that lacked blocks
    first = [waiting_candidate(moment, call) for call in islice(turns, 1)] if admits else []
    best_effort = [one for one in running if not one.missed_slo]
    if first or best_effort:
        batch.reserve_tokens = ceil(moment.settings.best_effort_share * batch.left_tokens)
    select_in_order(moment, batch, [one for one in running if one.missed_slo])
    if admits and not any(batch.left_tokens and not batch.has_blocks(one) for one in startable(moment, batch, first)):
        _add_missed(moment, batch, missed)
    batch.reserve_tokens = 0
    select_in_order(moment, batch, best_effort)
    left: Iterator[LocalCall] = turns
    waiting = chain(first, (waiting_candidate(moment, call) for call in turns)) if admits else ()
    for candidate in startable(moment, batch, waiting):
        if not _add(batch, candidate):
            left = chain((candidate.call,), turns)
            break
    return chain(left, (one.call for _, one in missed))


def _add_missed(moment: Moment, batch: Batch, missed: Sequence[Ranked]) -> None:
    """Add calls in order. `PASS_RATIO` and `MOST_MISSED_MISFITS` limit which calls may bypass a call that misfits."""
    misfits, least_ratio = 0, 0.0
    for ratio, candidate in missed:
        if ratio < least_ratio or misfits > MOST_MISSED_MISFITS:
            return
        if hold_follower(moment, batch, candidate):
            continue
        if not _add(batch, candidate):
            misfits += 1
            least_ratio = max(least_ratio, ratio / PASS_RATIO)


def _add(batch: Batch, candidate: Candidate) -> bool:
    tokens = batch.fit(candidate)
    if tokens:
        batch.add(candidate, tokens)
    return tokens > 0
