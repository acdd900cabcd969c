"""The first calls of an iteration, for which running calls may be preempted.

These are the running decodes, then urgent calls and prompts begun. The decodes' SLOs limit the prompts beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment, preemption_key
from plait.policy.scheduling.shared_prefixes import startable

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


FLOOR_SHARE = 0.1
"""Ours: prompts get this share of the engine's maximum if decodes alone exceed their iteration SLO."""

WATERMARK_BLOCKS = 2
"""Ours: the free blocks that are reserved for each running decode when prompts are admitted."""


def add_decodes(moment: Moment, batch: Batch) -> None:
    """Add the running decodes. While blocks are short, preempt the cheapest victim."""
    needed = moment.facts.blocks_needed
    tokens = sum([tokens for _, tokens, _ in moment.decodes])
    blocks = sum([needed(call, tokens) for call, tokens, _ in moment.decodes])
    if tokens <= moment.facts.max_batch_tokens and blocks <= batch.free_blocks:
        batch.add_decodes(moment.decodes, tokens, blocks)
    else:
        _add_some(moment, batch)


def _add_some(moment: Moment, batch: Batch) -> None:
    victims = [*moment.preemption_order]
    for decode in sorted(moment.decode_candidates, key=preemption_key):
        if decode.call in batch.preempted:
            continue
        tokens = batch.budget.room(decode.tokens, decode.context_tokens)
        if not tokens:
            break
        need = moment.facts.blocks_needed(decode.call, tokens)
        while need > batch.free_blocks:
            victim = victims.pop()
            batch.preempt(victim.call)
            if victim is decode:
                break
        else:
            batch.add(decode, tokens)


def limit_to_tightest_slo(moment: Moment, batch: Batch) -> None:
    """Limit the iteration to its decodes' tightest iteration SLO.

    If the decodes alone take longer than that, prompts get `FLOOR_SHARE` all the same.
    """
    base_s = batch.budget.time_s()
    decodes = [call for call, _, _ in moment.decodes if call in batch.picks]
    tpot_s, jct_s = moment.objectives.tightest_s(decodes, moment.now_s, moment.pace)
    if min(tpot_s, jct_s) < base_s:
        batch.floor_tokens = max(2, int(FLOOR_SHARE * moment.facts.max_batch_tokens))
    batch.limit(max(tpot_s, base_s))
    batch.limit_patient(max(jct_s, base_s))


def reserve_blocks(moment: Moment, batch: Batch) -> None:
    """Reserve the blocks that prompts begun still need, and `WATERMARK_BLOCKS` for each decode."""
    needed = moment.facts.blocks_needed
    begun = sum(needed(prefill.call, prefill.tokens) for prefill in moment.prefills)
    batch.unreserved_blocks = batch.free_blocks - begun - WATERMARK_BLOCKS * len(moment.decodes)


MakeRoom = Callable[[Moment, Batch, Candidate], bool]
"""Tries to free the blocks that a candidate lacks. Returns whether to try the candidate again."""


def order_by_slack(moment: Moment, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in ascending T_r. A prompt begun has the T_r that it would have if nothing of it were computed.

    Otherwise its progress would put it behind equal waiting calls, and the scheduler would compute a chunk of each.
    """
    execution_s, arrivals_s = moment.objectives.execution(moment.pace).of, moment.arrivals_slack_s

    def slack_s(one: Candidate) -> float:
        whole_s = one.remaining_s if one.waits else one.remaining_s - execution_s(one.context_tokens)
        return whole_s if one.due_s is not None or arrivals_s is None else max(whole_s, arrivals_s)

    return sorted(candidates, key=slack_s)


def add_urgent(moment: Moment, batch: Batch, candidates: Sequence[Candidate], make_room: MakeRoom) -> None:
    """Add the candidates that fit, in order. If a candidate does not fit, try to make room for it."""
    for candidate in startable(moment, batch, candidates):
        if candidate.call in batch.preempted:
            continue
        tokens = batch.fit(candidate)
        if not tokens and make_room(moment, batch, candidate):
            tokens = batch.fit(candidate)
        if tokens:
            _pause_decodes(moment, batch, candidate, tokens)
            batch.add(candidate, tokens)
        elif batch.left_tokens <= batch.reserve_tokens:
            return


def may_pause(paused_s: float | None, now_s: float) -> bool:
    """Whether a plan may leave out decodes: not in two iterations in a row. `paused_s` is when the last plan did."""
    return paused_s in {None, now_s}  # a plan for the same moment may leave them out again


def _pause_decodes(moment: Moment, batch: Batch, candidate: Candidate, tokens: int) -> None:
    """Leave out the decodes that can wait, if the candidate's next token is in time only without them."""
    budget, due_s = batch.budget, candidate.due_s
    if due_s is None or tokens < candidate.tokens or not moment.may_pause:
        return
    if budget.time_s(tokens, candidate.context_tokens) <= due_s:
        return
    paused = [one for one in moment.decode_candidates if one.call in batch.picks and _can_wait(moment, one, due_s)]
    for one in paused:
        batch.remove(one)
    if budget.time_s(tokens, candidate.context_tokens) <= due_s:
        batch.paused = bool(paused)
        return
    for one in paused:  # the token is late in any case
        batch.add(one, one.tokens)


def _can_wait(moment: Moment, decode: Candidate, seconds: float) -> bool:
    """Whether a decode may wait for an iteration of `seconds` and still be in time in the next."""
    slo = moment.objectives.of(decode.call)
    due_s = None if slo is None else moment.objectives.due_s(decode.call, slo, moment.now_s)
    return due_s is None or due_s >= seconds + moment.pace.shortest_s
