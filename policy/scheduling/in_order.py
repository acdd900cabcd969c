"""Schedulers that pick running calls first, then waiting calls in an order until one does not fit.

The order of admission is by arrival, by longest cached prefix, or by hit-ratio groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice
from math import lcm
from operator import attrgetter
from typing import NamedTuple, TypeVar

from plait.policy.order import Kept, Rank, rank_of
from plait.policy.scheduling.leaders import MOST_HELD, Leaders
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan, ready

T = TypeVar("T")

_OBJECTIVE = attrgetter("objective")

GROUPS = 10
"""P, from Preble's section 3.3."""


class HitRatioGroups:
    """The groups' positions: a larger cached share is admitted more often, and no call starves (Preble, 3.3).

    A waiting call belongs to group `floor(P x cached share)`. Group g gets picks in proportion to its weight g + 1, by
    stride scheduling. A pick advances the group's position by a step, which is inversely proportional to the weight.
    The group with the lowest position is picked next. All numbers are integers, so the order is exact and the same
    everywhere. `turns` looks ahead and changes nothing. `charge` makes a pick count.

    The p-th call of group g is picked within `ceil(55 p / (g + 1)) + 55` picks. Proof: a group starts at most one step
    (the time of 55 / (g + 1) picks) ahead of the others. It reaches its p-th pick after p - 1 more steps. Until then
    every other group gets at most its proportion, and one pick for rounding. Up to the p-th pick, all groups together
    get fewer than `55 p / (g + 1) + 10` picks.
    """

    def __init__(self, groups: int = GROUPS) -> None:
        self._groups = groups
        scale = lcm(*range(1, groups + 1))
        self._steps = [scale // (group + 1) for group in range(groups)]
        self._positions = [0] * groups
        self._reached = 0
        """The position of the latest pick. An idle group starts again from here, so it does not save up turns."""

    def group(self, cached_tokens: int, tokens: int) -> int:
        groups = self._groups
        return groups * cached_tokens // tokens if cached_tokens < tokens else groups - 1

    def turns(self, queues: Sequence[Collection[T]]) -> Iterator[tuple[int, T]]:
        """(group, call) in the order of picks. `queues` has one queue of waiting calls for each group, by group."""
        # Ties: the group with the larger cached share goes first.
        standing = [(max(self._positions[group], self._reached), -group) for group, queue in enumerate(queues) if queue]
        heapify(standing)
        rests = [iter(queue) for queue in queues]
        while standing:
            position, negative = standing[0]
            call = next(rests[-negative], None)
            if call is None:
                heappop(standing)
                continue
            yield -negative, call
            heapreplace(standing, (position + self._steps[-negative], negative))

    def charge(self, group: int) -> None:
        """A call of the group was admitted. The caller charges admitted calls in the order of `turns`."""
        self._reached = max(self._positions[group], self._reached)
        self._positions[group] = self._reached + self._steps[group]


MAX_BACKFILL_CALLS = 16
"""Ours: the most waiting calls in a plan's backfill. An iteration admits fewer, and each iteration has a new list."""

LEAST_SHARED_TOKENS = 256
"""Ours: a call waits for a leader that computes at least this many tokens for it. An iteration's fixed time equals the
time of about 200 tokens (22 ms on the profile `a6000-mistral-7b`), so waiting for fewer tokens would gain nothing.
"""

Order = Callable[[Sequence[LocalCall], EngineFacts], Iterable[LocalCall]]
"""Puts the waiting calls into the order of admission."""


class Fcfs:
    """First come, first served with chunked prefill."""

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """Running calls first, then waiting calls.

        If a running call lacks blocks, the latest running call is preempted.
        """
        del now_s
        return plan_in_order(waiting, running, facts, lambda waiting, _: waiting)


class LongestPrefix:
    """Admits the waiting calls with the most cached prompt tokens first (SGLang's LPM). It can starve a call."""

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """Running calls as in `Fcfs`. Ties among waiting calls: the lower priority value, then the earlier arrival."""
        del now_s
        return plan_in_order(waiting, running, facts, _longest_prefix_first)


class HitRatio:
    """Admits waiting calls in the turns of their hit-ratio groups. In a group they go by priority, then arrival."""

    def __init__(self) -> None:
        self._order = HitRatioOrder()

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """Running calls as in `Fcfs`. A turn is charged once the engine has taken the call from its queue."""
        del now_s
        self._order.settle(waiting)
        return plan_in_order(waiting, running, facts, self._order.turns)


class HitRatioOrder:
    """Puts waiting calls into the order of their ranks (`policy.order`), and within one into the turns of their
    hit-ratio groups.
    """

    def __init__(self) -> None:
        self._groups = HitRatioGroups()
        self._kept = Kept()
        self._ranks: Collection[Rank] = ()
        self._offered: list[tuple[int, LocalCall]] = []

    def settle(self, waiting: Sequence[LocalCall]) -> None:
        """Charge the turns of the calls that were offered by the last plan and no longer wait."""
        if self._offered:
            still = {id(call) for call in waiting}
            for group, call in self._offered:
                if id(call) not in still:
                    self._groups.charge(group)
                    if self._ranks:
                        self._kept.serve(rank_of(call.slo, call.objective), call.prompt_tokens, self._ranks)
            self._offered = []

    def turns(self, waiting: Sequence[LocalCall], facts: EngineFacts) -> Iterator[LocalCall]:
        """The calls in the order of admission."""
        self._offered, self._ranks = [], ()
        if not any(map(_OBJECTIVE, waiting)):
            yield from self._in_groups(waiting, facts)
            return
        by_rank: dict[Rank, list[LocalCall]] = {}
        for call in waiting:
            by_rank.setdefault(rank_of(call.slo, call.objective), []).append(call)
        turns = {rank: self._in_groups(calls, facts) for rank, calls in by_rank.items()}
        self._ranks = by_rank.keys()
        first = self._kept.first({rank: calls[0].prompt_tokens for rank, calls in by_rank.items()})
        yield from islice(turns[first], 1)
        for rank in sorted(turns):
            yield from turns[rank]

    def _in_groups(self, waiting: Sequence[LocalCall], facts: EngineFacts) -> Iterator[LocalCall]:
        """Calls of one rank."""
        queues: list[list[LocalCall]] = [[] for _ in range(GROUPS)]
        group, cached_tokens = self._groups.group, facts.cached_tokens
        ranked = False
        for call in waiting:
            queues[group(cached_tokens(call), call.prompt_tokens + call.output_tokens)].append(call)
            if call.priority:
                ranked = True
        if ranked:
            for queue in queues:
                queue.sort(key=attrgetter("priority"))
        for turn in self._groups.turns(queues):
            self._offered.append(turn)
            yield turn[1]


def _longest_prefix_first(waiting: Sequence[LocalCall], facts: EngineFacts) -> list[LocalCall]:
    return sorted(waiting, key=lambda call: (-facts.cached_tokens(call), call.priority))


def plan_in_order(
    waiting: Sequence[LocalCall],
    running: Sequence[LocalCall],
    facts: EngineFacts,
    order: Order,
    *,
    leaders: Leaders | None = None,
) -> Plan:
    """Pick running calls in their order, then waiting calls in `order`, until budget, blocks or slots run out.

    If a running call lacks blocks, the latest running call is preempted. No call is admitted after a preemption.
    With `leaders`, which are empty at first, calls wait for a leader that computes their prefix.
    """
    budget, free = facts.max_batch_tokens, facts.free_blocks
    staying, preempted, picks = list(running), [], []
    position = 0
    while position < len(staying) and budget > 0:
        call = staying[position]
        tokens = min(call.uncomputed_tokens, budget)
        need = facts.blocks_needed(call, tokens)
        while need > free and len(staying) > position + 1:
            victim = staying.pop()
            preempted.append(victim)
            free += facts.blocks_freed(victim)
        if need > free:
            preempted.append(staying.pop())
            break
        picks.append((call, tokens))
        budget -= tokens
        free -= need
        position += 1
    rest, free_slots = staying[position:], facts.max_running_calls - len(staying)
    if preempted or free_slots <= 0 or budget <= 0:
        return Plan(tuple(preempted), tuple(picks), tuple(rest))
    if leaders is not None:
        _lead(leaders, picks, facts)
    found = _startable(order(ready(waiting, facts), facts), facts, leaders)
    admitted, misfit = _admit(found, _Room(free_slots, budget, free), facts, leaders)
    backfill = islice(chain(misfit, (call for call, _ in found)), MAX_BACKFILL_CALLS)
    return Plan((), (*picks, *admitted), (*rest, *backfill))


def _lead(leaders: Leaders, running: Iterable[tuple[LocalCall, int]], facts: EngineFacts) -> None:
    """A running call leads until other calls can find the running call's whole prompt in the cache."""
    for call, tokens in running:
        if call.output_tokens <= 1:
            leaders.add(call, facts.stored_tokens(call), min(call.prompt_tokens, call.computed_tokens + tokens))


def _startable(
    ordered: Iterable[LocalCall], facts: EngineFacts, leaders: Leaders | None
) -> Iterator[tuple[LocalCall, int]]:
    """(Call, cached tokens) without the calls that wait for a leader."""
    held = 0
    for call in ordered:
        cached_tokens = facts.cached_tokens(call)
        now_tokens, next_tokens = leaders.cached_tokens(call, cached_tokens) if leaders else (cached_tokens,) * 2
        if next_tokens - now_tokens < LEAST_SHARED_TOKENS:
            yield call, now_tokens
            continue
        held += 1
        if held >= MOST_HELD:
            return


class _Room(NamedTuple):
    """What is left for waiting calls."""

    slots: int
    tokens: int
    blocks: int


def _admit(
    candidates: Iterator[tuple[LocalCall, int]], room: _Room, facts: EngineFacts, leaders: Leaders | None
) -> tuple[list[tuple[LocalCall, int]], list[LocalCall]]:
    """Returns the picks until budget, blocks or slots run out, and the first call that did not fit, if any.

    `candidates` are calls and their cached tokens.
    """
    admitted: list[tuple[LocalCall, int]] = []
    free_slots, budget, free = room
    while len(admitted) < free_slots and budget > 0:
        candidate = next(candidates, None)
        if candidate is None:
            break
        call, cached_tokens = candidate
        tokens = min(call.uncomputed_tokens - cached_tokens, budget)
        need = facts.blocks_needed(call, tokens)
        if tokens <= 0 or need > free:
            return admitted, [call]
        admitted.append((call, tokens))
        if leaders is not None:
            leaders.add(call, cached_tokens, cached_tokens + tokens)
        budget -= tokens
        free -= need
    return admitted, []
