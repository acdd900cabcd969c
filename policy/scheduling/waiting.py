"""Sorts the waiting calls: calls that can still meet their SLO, calls that have missed it, and best-effort calls.

This part of a plan visits every waiting call, so it does little for each and builds few objects.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain, islice
from math import inf
from operator import itemgetter

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.plan import LocalCall
from plait.policy.scheduling.selection import MISFITS, WINDOW_CALLS, select_in_order

Entry = tuple[float, int, LocalCall, int, int, float | None]
"""(T_r, priority, call, uncached tokens, cached tokens, time until the first token is due)."""
_REMAINING, _PRIORITY = itemgetter(0), itemgetter(1)

Missed = tuple[LocalCall, int, int]
"""(Call that missed its SLO, uncached tokens, cached tokens)."""

Ranked = tuple[float, Candidate]
"""(Response ratio, call that missed its SLO)."""


@dataclass(slots=True)
class TimedCalls:
    """All waiting calls, in the order of arrival.

    Calls in `entries` can still meet their SLO, calls in `missed` cannot, and calls in `best_effort` have no deadline.
    """

    entries: list[Entry] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    best_effort: list[LocalCall] = field(default_factory=list)

    def sort(self) -> None:
        """Sort the `entries` by T_r, then priority, then arrival."""
        if any(map(_PRIORITY, self.entries)):
            self.entries.sort(key=_PRIORITY)
        self.entries.sort(key=_REMAINING)


class Upcoming:
    """Candidates that can be read again and again. Each is made when it is first read, because most plans read few."""

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._made: list[Candidate] = []
        self._to_make = iter(candidates)

    def __iter__(self) -> Iterator[Candidate]:
        made, position = self._made, 0
        while position < len(made) or self._make():
            yield made[position]
            position += 1

    def _make(self) -> bool:
        candidate = next(self._to_make, None)
        if candidate is not None:
            self._made.append(candidate)
        return candidate is not None


@dataclass(slots=True)
class Sorted:
    """The waiting calls that a plan can use.

    - `urgent`, `normal`: in ascending T_r.
    - `held`: the long prompts that may not start; filled while `normal` is read.
    - `missed`: by priority, then descending response ratio.
    - `best_effort`: all waiting best-effort calls, in the order of arrival.
    """

    urgent: list[Candidate] = field(default_factory=list)
    normal: Upcoming = field(default_factory=Upcoming)
    held: list[Candidate] = field(default_factory=list)
    missed: list[Ranked] = field(default_factory=list)
    best_effort: list[LocalCall] = field(default_factory=list)

    def startable(self) -> Iterator[Candidate]:
        """The calls that can still meet their SLO and may start, in ascending T_r."""
        return chain(self.urgent, self.normal)


def sort_waiting(moment: Moment, batch: Batch, long_slots: int) -> Sorted:
    """Sort the waiting calls by T_r, then priority, then arrival. At most `long_slots` long prompts may start."""
    near_s = max(moment.pace.longest_s, batch.budget.time_s())
    timed = time_waiting(moment, batch, near_s)
    timed.sort()
    return divide(timed, moment, batch, long_slots, moment.pace.longest_s)


def time_waiting(moment: Moment, batch: Batch, near_s: float) -> TimedCalls:
    """Compute T_r and due times of the waiting calls, and find those that have missed their SLO.

    Only calls with a T_r under `near_s`, or with output, can have missed it.
    """
    timed = TimedCalls()
    entries, missed, best_effort = timed.entries, timed.missed, timed.best_effort
    now_s, objectives, cached_tokens = moment.now_s, moment.objectives, moment.facts.cached_tokens
    in_time = 1 - moment.pace.jitter
    timing = objectives.timer(now_s, moment.pace, moment.arrivals_slack_s)
    base_s, chunk_tokens, chunk_s = objectives.execution(moment.pace)
    for call in moment.waiting:
        slo = call.slo or objectives.of(call)
        if slo is None:
            best_effort.append(call)
            continue
        cached, generated = cached_tokens(call), call.output_tokens
        tokens = call.prompt_tokens + generated - call.computed_tokens - cached
        ttft_s, jct_s = slo.ttft_s, slo.jct_s
        if generated or ttft_s is None or jct_s is not None:
            remaining_s, due_s = timing(call, slo, tokens)
            if remaining_s == inf:
                best_effort.append(call)
                continue
        else:  # `timing` inlined, because most calls have a TTFT alone and wait for their first token
            due_s = in_time * ttft_s - (now_s - call.arrived_s)
            remaining_s = due_s - (base_s + -(-tokens // chunk_tokens) * chunk_s)
        if generated or remaining_s < near_s:
            late = ttft_s is not None and now_s - call.arrived_s >= ttft_s and not generated
            if late or objectives.misses(call, slo, now_s, _soonest_s(moment, batch, tokens, cached)):
                missed.append((call, tokens, cached))
                continue
        entries.append((remaining_s, call.priority, call, tokens, cached, due_s))
    return timed


def _soonest_s(moment: Moment, batch: Batch, tokens: int, cached_tokens: int) -> float:
    """The earliest time of a waiting call's next token, in seconds from now.

    If decodes may be left out, the call computes alone. Otherwise it computes beside them.
    """
    alone = moment.may_pause and tokens <= moment.facts.max_batch_tokens
    return (moment.empty_budget if alone else batch.budget).time_s(tokens, cached_tokens)


def divide(timed: TimedCalls, moment: Moment, batch: Batch, long_slots: int, urgent_s: float) -> Sorted:
    """Turn the first entries into candidates, as many as a plan can use. A call with T_r up to `urgent_s` is urgent."""
    found = Sorted(best_effort=timed.best_effort)
    if timed.missed:
        found.missed = _by_response_ratio(timed.missed, moment, batch)
    entries, long_tokens = timed.entries, moment.settings.long_tokens
    most = max(0, batch.free_slots) + MISFITS + WINDOW_CALLS
    n_urgent = min(most, bisect_right(entries, urgent_s, key=_REMAINING))
    found.urgent = [_candidate(entry, long_tokens) for entry in entries[:n_urgent]]
    normal = (_candidate(entry, long_tokens) for entry in islice(entries, n_urgent, None))
    found.normal = Upcoming(islice(_hold_long(normal, long_slots, found.held), most - n_urgent))
    return found


def _candidate(entry: Entry, long_tokens: int) -> Candidate:
    remaining_s, _, call, tokens, cached, due_s = entry
    return Candidate(call, tokens, cached, True, remaining_s, due_s, tokens >= long_tokens)


def _hold_long(candidates: Iterable[Candidate], long_slots: int, held: list[Candidate]) -> Iterator[Candidate]:
    """The candidates with at most `long_slots` long prompts. The first of the other long prompts go to `held`."""
    for candidate in candidates:
        if candidate.is_long:
            if long_slots <= 0:
                if len(held) < MISFITS:
                    held.append(candidate)
                continue
            long_slots -= 1
        yield candidate


def _by_response_ratio(missed: Sequence[Missed], moment: Moment, batch: Batch) -> list[Ranked]:
    """The first `missed` calls, as many as a plan can use, by priority, then by descending response ratio.

    The ratio is the time waited divided by the KV time to come: tokens in the cache times seconds, because the KV cache
    runs out first. So large calls do not delay small ones. A large call gets its turn, because its ratio grows while it
    waits.
    """
    now_s, pace = moment.now_s, moment.pace
    token_s = 1 / pace.tokens_per_s if pace.tokens_per_s else 0.0
    decode_s = pace.shortest_s or 1.0  # without a cost model, only tokens count
    entries = []
    for position, (call, tokens, _) in enumerate(missed):
        generated = call.output_tokens
        to_come = pace.mean_tokens_to_come(call)
        kv_time = (call.prompt_tokens + generated + to_come / 2) * (tokens * token_s + to_come * decode_s)
        entries.append((-call.priority, (now_s - call.arrived_s) / kv_time, -position))
    first = nlargest(max(0, batch.free_slots) + MISFITS, entries)
    return [(ratio, Candidate(*missed[-position], True, missed_slo=True)) for _, ratio, position in first]


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
