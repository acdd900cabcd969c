"""Lets waiting calls with a common prefix wait while one call, the leader, computes it. So it is computed once.

A call follows a leader if the leader computes the block that the call needs next. The call waits only in iterations in
which the leader computes tokens, and only if it ends no later for that. So it never waits for a leader that stands
still, has ended or was preempted, or for blocks that were evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from math import inf

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.leaders import MOST_HELD
from plait.policy.scheduling.moment import Moment, waiting_candidate
from plait.policy.scheduling.plan import LocalCall


def startable(moment: Moment, batch: Batch, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """The candidates without those that wait for a leader. The batch may change between two of them."""
    held = 0
    for candidate in candidates:
        if not follows(moment, batch, candidate):
            yield candidate
            continue
        held += 1
        if held >= MOST_HELD:
            return


def startable_calls(moment: Moment, batch: Batch, waiting: Iterable[LocalCall]) -> Iterator[LocalCall]:
    """The waiting calls without those that wait for a leader."""
    leaders, cached_tokens = batch.leaders, moment.facts.cached_tokens
    for call in waiting:
        led = bool(leaders) and (call in leaders.followers or leaders.compute_for(call, cached_tokens(call)))
        if not (led and _waits(moment, batch, waiting_candidate(moment, call))):
            yield call


def follows(moment: Moment, batch: Batch, candidate: Candidate) -> bool:
    """Whether a waiting call that could get tokens in this iteration waits for a leader instead.

    If the engine can use a leader's blocks in this iteration, they count as cached.
    """
    if not (candidate.waits and batch.leaders) or batch.left_tokens <= batch.reserve_tokens:
        return False
    return _waits(moment, batch, candidate)


def _waits(moment: Moment, batch: Batch, candidate: Candidate) -> bool:
    if candidate.call in batch.leaders.followers:
        return True
    if not batch.leaders.compute_for(candidate.call, candidate.context_tokens):
        return False
    now_tokens, next_tokens = batch.leaders.cached_tokens(candidate.call, candidate.context_tokens)
    candidate.tokens -= now_tokens - candidate.context_tokens
    candidate.context_tokens = now_tokens
    if next_tokens == now_tokens:
        return False
    now_s = batch.budget.time_s(candidate.tokens, now_tokens)
    next_s = moment.empty_budget.time_s(candidate.tokens - (next_tokens - now_tokens), next_tokens)
    if batch.budget.time_s() + next_s > now_s:  # it would end later if it waited
        return False
    batch.leaders.followers.add(candidate.call)
    return True


def lead_in_flight(moment: Moment, batch: Batch) -> None:
    """A call whose prompt an engine has computed, but not yet stored, leads: its blocks can be found soon."""
    for call, _, _ in moment.decodes:
        if call.output_tokens == 1:
            batch.leaders.add(call, moment.facts.stored_tokens(call), call.prompt_tokens)


def inherit(moment: Moment, waiting: Iterable[Candidate]) -> None:
    """A prompt begun gets the least T_r of the calls that follow it, because they depend on it.

    The `waiting` calls are in ascending T_r. Most have more time than the prompts begun.
    """
    facts = moment.facts
    begun = {facts.block_key(prefill.call, facts.stored_tokens(prefill.call)): prefill for prefill in moment.prefills}
    begun.pop(None, None)
    most_s = max((leader.remaining_s for leader in begun.values()), default=-inf)
    for candidate in takewhile(lambda one: one.remaining_s < most_s, waiting):
        leader = begun.get(facts.block_key(candidate.call, candidate.context_tokens))
        if leader is not None and candidate.remaining_s < leader.remaining_s:
            leader.remaining_s, leader.missed_slo = candidate.remaining_s, False
