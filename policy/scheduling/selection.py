"""Selects calls that together use up an iteration's compute and the free KV blocks (AccelGen, section 4.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from math import inf

from plait.policy.scheduling.batching import Batch, Candidate
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.shared_prefixes import startable

WINDOW_S = 0.75
"""Gamma: calls whose T_r differ by at most this are picked by fit. The paper only calls gamma small
(docs/design/local-scheduler.md).
"""

WINDOW_CALLS = 32
"""Ours: a window has at most this many calls, so that a plan's time does not grow with the square of the queue."""

MISFITS = 64
"""Ours: the search ends after this many calls that do not fit."""


def select_in_order(moment: Moment, batch: Batch, candidates: Iterable[Candidate]) -> None:
    """Add the candidates that fit, in order. The prompt at which the budget ends is cut."""
    misfits = 0
    for candidate in startable(moment, batch, candidates):
        if misfits >= MISFITS:
            return
        tokens = batch.fit(candidate)
        if tokens:
            batch.add(candidate, tokens)
        else:
            misfits += 1
            if batch.left_tokens <= batch.reserve_tokens:
                return


def select_by_distance(moment: Moment, batch: Batch, candidates: Iterable[Candidate]) -> None:
    """Algorithm 2: add calls window by window, until no tokens are left or no call fits.

    `candidates` are in ascending T_r.
    """
    start = 0
    while batch.free_slots > 0 and (window := _window(islice(candidates, start, start + WINDOW_CALLS))):
        start += len(window)
        left = _fill(moment, batch, window)
        if left:
            select_in_order(moment, batch, left)  # no other call fits whole: cut the first that fits in part
            if start >= MISFITS or batch.left_tokens <= batch.reserve_tokens:
                return


def _window(candidates: Iterator[Candidate]) -> list[Candidate]:
    """The first candidates whose T_r differ by at most `WINDOW_S`."""
    first = next(candidates, None)
    if first is None:
        return []
    latest_s = first.remaining_s + WINDOW_S
    return [first, *takewhile(lambda one: one.remaining_s <= latest_s, candidates)]


def _fill(moment: Moment, batch: Batch, window: list[Candidate]) -> list[Candidate]:
    """Add calls that fit whole, the nearest to the compute and KV left first. Returns the other calls, in order."""
    compute, blocks = batch.left_tokens - batch.reserve_tokens, batch.free_blocks
    demands, facts = {}, moment.facts
    for candidate in startable(moment, batch, window):
        tokens = batch.fit(candidate) if candidate.is_long else candidate.tokens
        if tokens:
            demands[candidate] = (tokens, facts.blocks_needed(candidate.call, tokens))
    nearest = list(demands) if _all_fit(batch, demands, compute) else _nearest_first(demands, compute, blocks)
    for candidate in startable(moment, batch, nearest):
        tokens = min(candidate.tokens, demands[candidate][0])
        if batch.fit(candidate) >= tokens:
            batch.add(candidate, tokens)
    return [candidate for candidate in window if candidate.call not in batch.picks]


def _all_fit(batch: Batch, demands: dict[Candidate, tuple[int, int]], compute: int) -> bool:
    tokens = sum(demand[0] for demand in demands.values())
    return tokens <= compute and sum(demand[1] for demand in demands.values()) <= batch.free_blocks


def _nearest_first(demands: dict[Candidate, tuple[int, int]], compute: int, blocks: int) -> list[Candidate]:
    """The order of picks: each time the call whose normalised demand is nearest to the compute and KV left."""
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
