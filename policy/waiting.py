"""The waiting calls sorted out: those that can still be served as promised, by urgency, and the others.

This is the part of a plan that looks at every waiting call, so that it does little for each and builds few objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from policy.batching import MISFITS, WINDOW_CALLS, Candidate
from policy.chunking import Budget
from policy.pace import Pace
from policy.plan import EngineFacts, LocalCall
from policy.slo import Objectives


@dataclass(frozen=True, slots=True)
class Moment:
    """When calls are sorted out, with what was promised them and at what pace the engine runs."""

    now_s: float
    objectives: Objectives
    pace: Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class SortRules:
    """How to sort: `seats` are left, and prompts of `long_tokens` are long.

    `start_long` says whether one that is not urgent may start, `one_long` that only one may. `by_arrival` keeps the
    order of arrival; `demote_lost` puts calls that cannot meet their TTFT among the others.
    """

    seats: int
    long_tokens: int
    start_long: bool
    one_long: bool
    by_arrival: bool
    demote_lost: bool


@dataclass(slots=True)
class Sorted:
    """`urgent` and `normal` in ascending T_r, as many as a plan can use; `held` are long prompts that may not start.

    `others` are in their order; `unpromised` says whether there are calls among them that never had a deadline.
    """

    urgent: list[Candidate] = field(default_factory=list)
    normal: list[Candidate] = field(default_factory=list)
    held: list[Candidate] = field(default_factory=list)
    others: list[LocalCall] = field(default_factory=list)
    unpromised: bool = False


Entry = tuple[float, int, int, int, int, float | None]
"""(T_r, priority, position, uncached tokens, cached tokens, time until the TTFT is due)."""


def sort_waiting(
    waiting: Sequence[LocalCall], moment: Moment, budget: Budget, facts: EngineFacts, rules: SortRules
) -> Sorted:
    """Sort out the calls; `budget` holds the running decodes already."""
    objectives, pace = moment.objectives, moment.pace
    entries: list[Entry] = []
    found = Sorted()
    others, cached_tokens, near_s = found.others, facts.cached_tokens, max(pace.longest_s, budget.time_s())
    timing, lost_matters = objectives.timer(moment.now_s, pace), rules.demote_lost
    for position, call in enumerate(waiting):
        slo = objectives.of(call)
        if slo is None:
            others.append(call)
            found.unpromised = True
            continue
        cached = cached_tokens(call)
        tokens = call.prompt_tokens + call.output_tokens - call.computed_tokens - cached
        remaining_s, due_s = timing(call, slo, tokens)
        if remaining_s == inf:
            others.append(call)
            found.unpromised = True
            continue
        near = lost_matters and remaining_s < near_s
        if near and is_lost(Candidate(call, tokens, cached, True, remaining_s, due_s), budget):
            others.append(call)
            continue
        entries.append((remaining_s, call.priority, position, tokens, cached, due_s))
    if not rules.by_arrival:
        entries.sort()
    _divide(entries, waiting, pace, rules, found)
    return found


def is_lost(candidate: Candidate, budget: Budget) -> bool:
    """Whether its first token comes too late even if the iteration has nothing but this call and the decodes."""
    due_s = candidate.due_s
    if due_s is None or candidate.call.output_tokens:
        return False
    return due_s <= 0 or budget.time_s(candidate.tokens, candidate.context_tokens) > due_s


def _divide(entries: list[Entry], waiting: Sequence[LocalCall], pace: Pace, rules: SortRules, found: Sorted) -> None:
    """Make candidates of the first entries: no plan seats or looks at more of them."""
    most = max(0, rules.seats) + MISFITS + WINDOW_CALLS
    start_long = rules.start_long
    for remaining_s, _, position, tokens, cached, due_s in entries:
        is_long = tokens >= rules.long_tokens
        urgent = remaining_s <= pace.longest_s and not rules.by_arrival
        candidate = Candidate(waiting[position], tokens, cached, True, remaining_s, due_s, is_long)
        if urgent:
            found.urgent.append(candidate)
        elif is_long and not start_long:
            if len(found.held) < MISFITS:
                found.held.append(candidate)
            continue
        else:
            found.normal.append(candidate)
            start_long = start_long and not (is_long and rules.one_long)
        most -= 1
        if most <= 0:
            return
