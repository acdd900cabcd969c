"""Starts long prompts one at a time, because several at once would all finish late."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.selection import select_in_order
from plait.policy.scheduling.waiting import Sorted


def long_slots(moment: Moment) -> int:
    """How many long prompts may start without being urgent: one, or none while a long prompt is being prefilled."""
    return 0 if any(prefill.is_long for prefill in moment.prefills) else 1


def release_long(moment: Moment, batch: Batch, found: Sorted) -> Sequence[Candidate]:
    """Start the first long prompt that was held back, in compute that would be idle.

    It starts only if tokens are left and this iteration finishes every long prompt begun. Returns the prompt that was
    tried, if any.
    """
    if not batch.left_tokens:
        return ()
    picks = batch.picks
    begun = chain(moment.prefills, (one for one in found.startable() if one.call in picks))
    if not all(picks.get(one.call) == one.tokens for one in begun if one.is_long):
        return ()
    first = found.held[:1]
    select_in_order(moment, batch, first)
    return first
