"""Preempts running calls for an urgent call, or a prompt begun, that lacks blocks."""

from __future__ import annotations

from collections.abc import Callable

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment

MayPreempt = Callable[[Moment, Candidate], bool]
"""Whether a running call may be preempted for another."""


def loses_nothing(moment: Moment, running: Candidate) -> bool:
    """Whether the running call is best-effort or has missed its SLO. Only such calls are preempted."""
    del moment
    return running.loses_nothing


def make_room(moment: Moment, batch: Batch, candidate: Candidate, may_preempt: MayPreempt = loses_nothing) -> bool:
    """Preempt until the candidate's blocks are free. If that frees too few blocks, preempt no call and return False."""
    if (candidate.waits and batch.free_slots <= 0) or batch.left_tokens <= batch.reserve_tokens:
        return False  # the candidate lacks a slot or tokens, not blocks
    facts, max_preemptions = moment.facts, moment.settings.max_preemptions
    room = batch.unreserved_blocks if candidate.waits else batch.free_blocks
    missing = facts.blocks_needed(candidate.call, candidate.tokens) - room
    urgent = candidate.remaining_s <= moment.pace.longest_s
    victims: list[Candidate] = []
    for one in reversed(moment.preemption_order):
        if one.call in batch.preempted:
            continue
        if missing <= 0 or (not one.loses_nothing and (not urgent or one.remaining_s <= candidate.remaining_s)):
            break
        if one is candidate or moment.preemptions.times(one.call) >= max_preemptions or not may_preempt(moment, one):
            continue
        freed = facts.blocks_freed(one.call)
        if freed:
            victims.append(one)
            missing -= freed
    if missing > 0:
        return False
    for victim in victims:
        batch.preempt(victim.call)
    return True
