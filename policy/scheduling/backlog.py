"""The time limit that lets an iteration end in time for the calls that arrive during it."""

from __future__ import annotations

from math import ceil, inf

from plait.policy.scheduling.batching import Batch
from plait.policy.scheduling.moment import Moment

SLACK_SHARE = 0.5
"""Ours: an iteration may take this share of the arrivals' TTFT slack."""

LEAST_ITERATIONS = 2.0
"""Ours: a shortened iteration lasts at least this many shortest iterations, so overhead is at most half of it."""


def backlog_limit_s(moment: Moment, batch: Batch) -> float:
    """The time limit while missed and best-effort calls are added: a share of the arrivals' TTFT slack.

    It is infinite if no arrivals are expected. If the share is under `LEAST_ITERATIONS` shortest iterations, a short
    iteration would not help arrivals. The limit is then the time with the pivot's tokens, after the longest context of
    a prompt that has begun: else such a prompt would hardly go on. `batch` holds the running decodes.
    """
    slack_s, pace = moment.arrivals_slack_s, moment.pace
    if slack_s is None:
        return inf
    if SLACK_SHARE * slack_s >= LEAST_ITERATIONS * pace.shortest_s:
        return SLACK_SHARE * slack_s
    context_tokens = max((one.context_tokens for one in moment.prefills), default=0)
    return batch.budget.time_s(pace.pivot_tokens, context_tokens)


def limit_backlog(batch: Batch, limit_s: float, reserve_tokens: int) -> None:
    """End the iteration within `limit_s`, but allow a part of the reserve beyond it.

    That part is `limit_s` divided by the iteration's time with all tokens left, at most 1.
    """
    if limit_s < batch.budget.limit_s:
        all_s = batch.budget.time_s(batch.left_tokens)
        batch.limit_backlog(limit_s, ceil(reserve_tokens * min(1.0, limit_s / all_s)) if all_s else reserve_tokens)
