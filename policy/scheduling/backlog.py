"""The limit on an iteration without urgent calls: it ends in time for the calls that arrive meanwhile."""

from __future__ import annotations

from math import ceil, inf

from plait.policy.scheduling.batching import Batch
from plait.policy.scheduling.moment import Moment

SLACK_SHARE = 0.5
"""Ours: an iteration may take this share of the arrivals' TTFT slack."""

LEAST_ITERATIONS = 2.0
"""A shortened iteration lasts at least this many shortest iterations, so that half of it is not overhead."""


def backlog_limit_s(moment: Moment, batch: Batch) -> float:
    """How long an iteration without urgent calls may last: a share of the arrivals' slack, infinite if none are due.

    If that share is under `LEAST_ITERATIONS` shortest iterations, arrivals cannot be helped. The iteration then lasts
    as long as at the pivot. `batch` holds the running decodes.
    """
    slack_s, pace = moment.arrivals_slack_s, moment.pace
    if slack_s is None:
        return inf
    if SLACK_SHARE * slack_s >= LEAST_ITERATIONS * pace.shortest_s:
        return SLACK_SHARE * slack_s
    return batch.budget.time_s(pace.pivot_tokens)


def limit_backlog(batch: Batch, limit_s: float, reserve_tokens: int) -> None:
    """End within `limit_s`. The reserve may exceed it, scaled by `limit_s` over the time of all tokens left."""
    if limit_s < batch.budget.limit_s:
        all_s = batch.budget.time_s(batch.left_tokens)
        batch.limit_backlog(limit_s, ceil(reserve_tokens * min(1.0, limit_s / all_s)) if all_s else reserve_tokens)
