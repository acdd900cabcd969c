"""Calls with a common prefix wait while one call, the leader, computes the prefix, which is then computed only once.

A call follows a leader if the leader computes the block that the call needs next. The call waits only in iterations in
which the leader computes tokens, and only if the call ends no later by waiting. So no call waits for a leader that
makes no progress, has ended or was preempted, or for blocks that were evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
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
        if not hold_follower(moment, batch, candidate):
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
        if not (led and follows(moment, batch, waiting_candidate(moment, call))):
            yield call


def hold_follower(moment: Moment, batch: Batch, candidate: Candidate) -> bool:
    """Hold a waiting call that could get tokens in this iteration, if it follows a leader. Returns whether it is held.

    A held call waits for the whole iteration. If the engine shares blocks within an iteration, the leaders' blocks
    count as cached from now on.
    """
    leaders, call = batch.leaders, candidate.call
    if not (candidate.waits and leaders) or batch.left_tokens <= batch.reserve_tokens:
        return False
    if call in leaders.followers:
        return True
    if not leaders.compute_for(call, candidate.context_tokens):
        return False
    is_held = follows(moment, batch, candidate)
    _use_shared(batch, candidate)
    if is_held:
        leaders.followers.add(call)
    return is_held


def follows(moment: Moment, batch: Batch, candidate: Candidate) -> bool:
    """Whether a waiting call should wait for a leader, because its prompt ends no later by waiting. Changes nothing."""
    leaders, call, context_tokens = batch.leaders, candidate.call, candidate.context_tokens
    if call in leaders.followers:
        return True
    now_tokens, next_tokens = leaders.cached_tokens(call, context_tokens)
    if next_tokens == now_tokens:
        return False
    tokens = candidate.tokens - (now_tokens - context_tokens)
    now_s = batch.budget.time_s(tokens, now_tokens)
    next_s = moment.empty_budget.time_s(tokens - (next_tokens - now_tokens), next_tokens)
    return batch.budget.time_s() + next_s <= now_s


def _use_shared(batch: Batch, candidate: Candidate) -> None:
    """Count as cached what leaders compute for the candidate in this iteration."""
    now_tokens, _ = batch.leaders.cached_tokens(candidate.call, candidate.context_tokens)
    candidate.tokens -= now_tokens - candidate.context_tokens
    candidate.context_tokens = now_tokens


def lead_in_flight(moment: Moment, batch: Batch) -> None:
    """Make leaders of calls with one token: the engine may store the last blocks of their prompts only later."""
    for call, _, _ in moment.decodes:
        if call.output_tokens == 1:
            batch.leaders.add(call, moment.facts.stored_tokens(call), call.prompt_tokens)


def with_heirs(moment: Moment, waiting: Iterable[Candidate]) -> Moment:
    """The moment with each prompt begun at the least T_r of its followers, which depend on it (priority inheritance).

    The `waiting` calls are in ascending T_r, so the search ends at the largest T_r of a prompt begun.
    """
    facts = moment.facts
    begun = {facts.block_key(prefill.call, facts.stored_tokens(prefill.call)): prefill for prefill in moment.prefills}
    begun.pop(None, None)
    most_s = max((leader.remaining_s for leader in begun.values()), default=-inf)
    least_s: dict[LocalCall, float] = {}  # by the call that leads
    for candidate in takewhile(lambda one: one.remaining_s < most_s, waiting):
        leader = begun.get(facts.block_key(candidate.call, candidate.context_tokens))
        if leader is not None and candidate.remaining_s < least_s.get(leader.call, leader.remaining_s):
            least_s[leader.call] = candidate.remaining_s
    if not least_s:
        return moment
    prefills = [
        replace(one, remaining_s=least_s[one.call], missed_slo=False) if one.call in least_s else one
        for one in moment.prefills
    ]
    return replace(moment, prefills=prefills)
