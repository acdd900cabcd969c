"""Adds urgent calls and prompts begun, before other prompts. Running calls may be preempted for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.shared_prefixes import startable

MakeRoom = Callable[[Moment, Batch, Candidate], bool]
"""Tries to free the blocks that a candidate lacks. Returns whether to try the candidate again."""


def order_by_slack(moment: Moment, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in ascending T_r. A prompt begun has the T_r that it would have if nothing of it were computed.

    Otherwise its progress would put it behind equal calls that wait, and all of them would be computed by turns.
    """
    execution_s = moment.objectives.execution(moment.pace).of

    def slack_s(one: Candidate) -> float:
        return one.remaining_s if one.waits else one.remaining_s - execution_s(one.context_tokens)

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
    """Whether decodes may be left out now. `paused_s` is when the last plan left them out; None if it did not."""
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
