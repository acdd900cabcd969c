"""Who shares an iteration: calls that together use up both its compute and the free KV blocks (AccelGen, section 4.4).

A call's compute demand is its uncached tokens, its KV demand the whole new blocks that they need. Prompts are cut where
the budget ends (dynamic chunking), long ones also where the KV cache does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from plait.policy.scheduling.chunking import Budget
from plait.policy.scheduling.plan import EngineFacts, LocalCall

WINDOW_S = 0.75
"""Gamma, of DESIGN 4.5: the paper only calls it small."""

WINDOW_CALLS = 32
"""Ours: calls compared with each other at most, so that a plan's time does not grow with the square of the queue."""

MISFITS = 64
"""Ours: calls found not to fit before the search ends."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A call that could get `tokens` of its own computed behind `context_tokens`; `due_s` as in `slo.Timer`.

    `is_lost`: its objectives cannot be met any more.
    """

    call: LocalCall
    tokens: int
    context_tokens: int
    waits: bool
    remaining_s: float = inf
    due_s: float | None = None
    is_long: bool = False
    is_lost: bool = False


class Batch:
    """An iteration as it fills up.

    `floor_tokens` may be computed even beyond the time limit; `withheld_tokens` of what is left are for others.
    `started` are the waiting calls that it admits. `open_blocks` are those of the `free_blocks` that no prompt begun
    will need: a prompt starts only where all of it has room, or several would soon stand in each other's way and one
    be computed again.
    """

    def __init__(self, budget: Budget, facts: EngineFacts, seats: int) -> None:
        self.budget = budget
        self.free_blocks = facts.free_blocks
        self.open_blocks = facts.free_blocks
        self.seats = seats
        self.floor_tokens = 0
        self.withheld_tokens = 0
        self.picks: dict[LocalCall, int] = {}
        self.started: list[Candidate] = []
        self._facts = facts
        self._changes = 0
        self._left_state: tuple[int, float, int] | None = None
        self._left_tokens = 0

    @property
    def left_tokens(self) -> int:
        """Tokens of prompts that it still has room for; asked for again and again while nothing changes."""
        state = (self._changes, self.budget.limit_s, self.floor_tokens)
        if state != self._left_state:
            self._left_state, self._left_tokens = state, self._room(self._facts.max_batch_tokens, 0)
        return self._left_tokens

    def fit(self, candidate: Candidate) -> int:
        """How many of the candidate's tokens fit; its KV is taken whole, but for a long prompt's."""
        if candidate.waits and self.seats <= 0:
            return 0
        tokens = self._room(candidate.tokens, candidate.context_tokens)
        if self.withheld_tokens and tokens:
            tokens = max(0, min(tokens, self.left_tokens - self.withheld_tokens))
        if not tokens:
            return 0
        if candidate.waits and not self.has_blocks(candidate):
            return 0
        if self._facts.blocks_needed(candidate.call, tokens) <= self.free_blocks:
            return tokens
        return self._most_for_blocks(candidate.call, tokens) if candidate.is_long else 0

    def has_blocks(self, candidate: Candidate) -> bool:
        """Whether a waiting call's KV has room, all of it."""
        return self._facts.blocks_needed(candidate.call, candidate.tokens) <= self.open_blocks

    def add(self, candidate: Candidate, tokens: int) -> None:
        """Compute so many tokens, as many as `fit` said at most, and keep to what the call was promised for it."""
        self._changes += 1
        self.free_blocks -= self._facts.blocks_needed(candidate.call, tokens)
        if candidate.waits:
            self.open_blocks -= self._facts.blocks_needed(candidate.call, candidate.tokens)
            self.seats -= 1
            self.started.append(candidate)
        self.budget.take(tokens, candidate.context_tokens)
        self.floor_tokens = max(0, self.floor_tokens - tokens)
        self.picks[candidate.call] = tokens
        if candidate.due_s is not None and tokens == candidate.tokens:
            self.limit(candidate.due_s)

    def add_decodes(self, decodes: Sequence[Candidate], tokens: int, blocks: int) -> None:
        """Compute all of these, which take `tokens` and `blocks` together."""
        self._changes += 1
        self.free_blocks -= blocks
        self.budget.take_decodes(tokens, sum(one.context_tokens for one in decodes))
        self.picks.update((one.call, one.tokens) for one in decodes)

    def remove(self, candidate: Candidate) -> None:
        """Leave out a running call that was added."""
        self._changes += 1
        tokens = self.picks.pop(candidate.call)
        self.free_blocks += self._facts.blocks_needed(candidate.call, tokens)
        self.budget.give_back(tokens, candidate.context_tokens)

    def extend(self, candidate: Candidate) -> None:
        """Compute more of a call that was cut, as far as there is room."""
        self._changes += 1
        given = self.picks[candidate.call]
        self.budget.give_back(given, candidate.context_tokens)
        tokens = max(given, self._room(candidate.tokens, candidate.context_tokens))
        blocks = self._facts.blocks_needed(candidate.call, tokens) - self._facts.blocks_needed(candidate.call, given)
        if blocks > self.free_blocks:
            tokens = given
        else:
            self.free_blocks -= blocks
        self.budget.take(tokens, candidate.context_tokens)
        self.picks[candidate.call] = tokens

    def limit(self, slo_s: float) -> None:
        """End within `slo_s`, if that can still be."""
        if self.budget.time_s() <= slo_s < self.budget.limit_s:
            self.budget.limit_s = slo_s

    def quieten(self, slo_s: float, tokens: int) -> None:
        """End within `slo_s` from now on, but for `tokens` more as far as there is room for them."""
        self.floor_tokens = max(self.floor_tokens, min(tokens, self.left_tokens))
        self.budget.limit_s = min(self.budget.limit_s, slo_s)

    def _room(self, wanted_tokens: int, context_tokens: int) -> int:
        room = self.budget.room(wanted_tokens, context_tokens)
        if room < self.floor_tokens and room < wanted_tokens:
            most = self._facts.max_batch_tokens - self.budget.tokens
            room = max(room, min(self.floor_tokens, wanted_tokens, most))
        return room

    def _most_for_blocks(self, call: LocalCall, tokens: int) -> int:
        """Most tokens whose blocks are free; one block a running call is left, for the next decodes."""
        blocks_needed, free_blocks = self._facts.blocks_needed, self.free_blocks - len(self.picks)
        low, high = 0, tokens
        while low < high - 1:
            middle = (low + high) // 2
            if blocks_needed(call, middle) <= free_blocks:
                low = middle
            else:
                high = middle
        return low


def select_in_order(batch: Batch, candidates: Sequence[Candidate]) -> None:
    """Add what fits, the first first, cutting the prompt at which the budget ends."""
    misfits = 0
    for candidate in candidates:
        if misfits >= MISFITS:
            return
        tokens = batch.fit(candidate)
        if tokens:
            batch.add(candidate, tokens)
        else:
            misfits += 1
            if batch.left_tokens <= batch.withheld_tokens:
                return


def select_by_distance(
    batch: Batch, candidates: Sequence[Candidate], facts: EngineFacts, window_s: float = WINDOW_S
) -> None:
    """Algorithm 2 over `candidates` in ascending T_r, from window to window until nothing is left or nobody fits."""
    start = 0
    while start < len(candidates) and batch.seats > 0:
        latest_s = candidates[start].remaining_s + window_s
        window = []
        for candidate in islice(candidates, start, start + WINDOW_CALLS):
            if candidate.remaining_s > latest_s:
                break
            window.append(candidate)
        start += len(window)
        left = _fill(batch, window, facts)
        if left:
            select_in_order(batch, left)  # nobody fits whole: cut the first that fits in part
            if start >= MISFITS or batch.left_tokens <= batch.withheld_tokens:
                return


def _fill(batch: Batch, window: list[Candidate], facts: EngineFacts) -> list[Candidate]:
    """Add those nearest to what is left of compute and KV as long as one fits whole; returns the others, in order."""
    compute, blocks = batch.left_tokens - batch.withheld_tokens, batch.free_blocks
    demands = {}
    for candidate in window:
        tokens = batch.fit(candidate) if candidate.is_long else candidate.tokens
        if tokens:
            demands[candidate] = (tokens, facts.blocks_needed(candidate.call, tokens))
    nearest = list(demands) if _all_fit(batch, demands, compute) else _nearest_first(demands, compute, blocks)
    for candidate in nearest:
        tokens = demands[candidate][0]
        if batch.fit(candidate) >= tokens:
            batch.add(candidate, tokens)
    return [candidate for candidate in window if candidate.call not in batch.picks]


def _all_fit(batch: Batch, demands: dict[Candidate, tuple[int, int]], compute: int) -> bool:
    tokens = sum(demand[0] for demand in demands.values())
    return tokens <= compute and sum(demand[1] for demand in demands.values()) <= batch.free_blocks


def _nearest_first(demands: dict[Candidate, tuple[int, int]], compute: int, blocks: int) -> list[Candidate]:
    """In the order of picks: each time the least distance of (compute, KV) demand to what is left, both normalised."""
    chosen: list[Candidate] = []
    left = [(tokens, needed, candidate) for candidate, (tokens, needed) in demands.items()]
    tokens_left, blocks_left = compute, blocks
    per_token, per_block = 1 / max(1, compute), 1 / max(1, blocks)
    while True:
        left = [entry for entry in left if entry[0] <= tokens_left and entry[1] <= blocks_left]
        if not left:
            return chosen
        best, best_distance = 0, inf
        for index, (tokens, needed, _) in enumerate(left):
            compute_gap = (tokens_left - tokens) * per_token
            block_gap = (blocks_left - needed) * per_block
            distance = compute_gap * compute_gap + block_gap * block_gap
            if distance < best_distance:
                best, best_distance = index, distance
        tokens, needed, candidate = left.pop(best)
        chosen.append(candidate)
        tokens_left -= tokens
        blocks_left -= needed
