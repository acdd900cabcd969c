"""The waiting calls sorted out: those that can still be served as promised, by urgency, and the others.

This is the part of a plan that looks at every waiting call, so that it does little for each and builds few objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import inf

from plait.policy.scheduling.batching import MISFITS, WINDOW_CALLS, Candidate
from plait.policy.scheduling.chunking import Budget
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.plan import EngineFacts, LocalCall
from plait.policy.scheduling.slo import Objectives


@dataclass(frozen=True, slots=True)
class Moment:
    """When calls are sorted out, with what was promised them and at what pace the engine runs.

    `budget` holds the running decodes already, `soonest` only those that cannot be paused for one iteration.
    """

    now_s: float
    objectives: Objectives
    pace: Pace
    budget: Budget
    soonest: Budget
    max_batch_tokens: int

    def soonest_s(self, tokens: int, context_tokens: int) -> float:
        """When a waiting call's next token could come at the earliest: now and again decodes have to go on."""
        budget = self.soonest if tokens <= self.max_batch_tokens else self.budget
        return budget.time_s(tokens, context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SortRules:
    """How to sort: `seats` are left, and prompts of `long_tokens` are long.

    `start_long` says whether one that is not urgent may start, `one_long` that only one may. `by_arrival` keeps the
    order of arrival; `demote_lost` takes calls that cannot meet their objectives any more from among the others.
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

    `lost` are in descending response ratio, the first of each pair, as many as a plan can use; `unpromised` are in the
    order of arrival.
    """

    urgent: list[Candidate] = field(default_factory=list)
    normal: list[Candidate] = field(default_factory=list)
    held: list[Candidate] = field(default_factory=list)
    lost: list[tuple[float, Candidate]] = field(default_factory=list)
    unpromised: list[LocalCall] = field(default_factory=list)


LEAST_OUTPUT_TOKENS = 32
"""Output still expected of a call that has generated more than the mean."""

Entry = tuple[float, int, int, int, int, float | None]
"""(T_r, priority, position, uncached tokens, cached tokens, time until the first token is due)."""


def sort_waiting(waiting: Sequence[LocalCall], moment: Moment, facts: EngineFacts, rules: SortRules) -> Sorted:
    """Sort out the calls."""
    objectives, pace = moment.objectives, moment.pace
    entries: list[Entry] = []
    lost: list[tuple[LocalCall, int, int]] = []
    found = Sorted()
    unpromised, cached_tokens = found.unpromised, facts.cached_tokens
    near_s = max(pace.longest_s, moment.budget.time_s())
    now_s, timing, lost_matters = moment.now_s, objectives.timer(moment.now_s, pace), rules.demote_lost
    for position, call in enumerate(waiting):
        slo = call.slo or objectives.of(call)
        if slo is None:
            unpromised.append(call)
            continue
        cached = cached_tokens(call)
        tokens = call.prompt_tokens + call.output_tokens - call.computed_tokens - cached
        remaining_s, due_s = timing(call, slo, tokens)
        if remaining_s == inf:
            unpromised.append(call)
            continue
        if lost_matters and (remaining_s < near_s or call.output_tokens):
            late = due_s is not None and due_s <= 0 and not call.output_tokens
            if late or objectives.too_late(call, slo, now_s, moment.soonest_s(tokens, cached)):
                lost.append((call, tokens, cached))
                continue
        entries.append((remaining_s, call.priority, position, tokens, cached, due_s))
    if not rules.by_arrival:
        entries.sort()
    _divide(entries, waiting, pace, rules, found)
    if lost:
        found.lost = _by_response_ratio(lost, moment, rules)
    return found


def _by_response_ratio(
    lost: list[tuple[LocalCall, int, int]], moment: Moment, rules: SortRules
) -> list[tuple[float, Candidate]]:
    """The first of them (a call, its uncached and its cached tokens) by time waited over KV time still to come.

    KV time is tokens held times seconds: the KV cache is what runs out first, so small calls are not held up by large
    ones; a large one's turn comes too, since its ratio grows as long as it waits.
    """
    now_s, pace, output_tokens = moment.now_s, moment.pace, moment.pace.output_tokens
    token_s = 1 / pace.tokens_per_s if pace.tokens_per_s else 0.0
    decode_s = pace.shortest_s or 1.0  # without a model of the engine only the tokens count
    entries = []
    for position, (call, tokens, _) in enumerate(lost):
        generated = call.output_tokens
        to_come = max(LEAST_OUTPUT_TOKENS, output_tokens(call.objective) - generated)
        kv_time = (call.prompt_tokens + generated + to_come / 2) * (tokens * token_s + to_come * decode_s)
        entries.append((-call.priority, (now_s - call.arrived_s) / kv_time, -position))
    first = nlargest(max(0, rules.seats) + MISFITS, entries)
    return [(ratio, Candidate(*lost[-position], True, is_lost=True)) for _, ratio, position in first]


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
