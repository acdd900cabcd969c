"""Starts long prompts one at a time, because several at once would all finish late."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.selection import select_in_order


def long_slots(moment: Moment) -> int:
    """How many long prompts may start without being urgent: one, or none while a long prompt is being prefilled."""
    return 0 if any(prefill.is_long for prefill in moment.prefills) else 1


def release_long(
    moment: Moment, batch: Batch, held: Sequence[Candidate], considered: Sequence[Candidate]
) -> Sequence[Candidate]:
    """Start the first `held` prompt in compute that would be idle.

    It starts only if tokens are left and this iteration finishes every long prompt begun. `considered` are the waiting
    calls that could start. Returns the prompt that was tried, if any.
    """
    picks = batch.picks
    if not held or not batch.left_tokens:
        return ()
    begun = chain(moment.prefills, (one for one in considered if one.call in picks))
    if not all(picks.get(one.call) == one.tokens for one in begun if one.is_long):
        return ()
    select_in_order(moment, batch, held[:1])
    return held[:1]
