"""Adds urgent calls and prompts begun; they go first, and running calls may be preempted for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment

MakeRoom = Callable[[Moment, Batch, Candidate], bool]
"""Tries to free the blocks that a candidate lacks; returns whether the candidate should be tried again."""


def add_urgent(moment: Moment, batch: Batch, candidates: Sequence[Candidate], make_room: MakeRoom) -> None:
    """Add the candidates, in ascending T_r, as far as there is room or room can be made."""
    for candidate in candidates:
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
    """Whether decodes may be left out now: not if they were left out of the iteration before, at `paused_s`."""
    return paused_s in {None, now_s}


def _pause_decodes(moment: Moment, batch: Batch, candidate: Candidate, tokens: int) -> None:
    """Leave out the decodes that can wait, if the candidate's first token is in time only without them."""
    budget, due_s = batch.budget, candidate.due_s
    if due_s is None or tokens < candidate.tokens or not moment.may_pause:
        return
    if budget.time_s(tokens, candidate.context_tokens) <= due_s:
        return
    paused = [one for one in moment.decodes if one.call in batch.picks and _can_wait(moment, one, due_s)]
    for one in paused:
        batch.remove(one)
    if budget.time_s(tokens, candidate.context_tokens) <= due_s:
        batch.paused = bool(paused)
        return
    for one in paused:  # it would not help
        batch.add(one, one.tokens)


def _can_wait(moment: Moment, decode: Candidate, seconds: float) -> bool:
    """Whether a decode's next token may come `seconds` later."""
    slo = moment.objectives.of(decode.call)
    due_s = None if slo is None else moment.objectives.due_s(decode.call, slo, moment.now_s)
    return due_s is None or due_s >= seconds + moment.pace.shortest_s
