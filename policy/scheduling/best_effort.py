"""What an iteration has left, for calls that nothing can be kept to: those promised nothing, and those late already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import ceil

from plait.policy.scheduling.batching import Batch, Candidate, select_in_order
from plait.policy.scheduling.plan import EngineFacts, LocalCall

PASS_RATIO = 32.0
"""A lost call that finds no room is passed only by others of at least this fraction of its response ratio, which grows
as it waits: none waits for ever.
"""

MOST_LOST_MISFITS = 8
"""Lost calls found not to fit before the others are left alone."""


class BestEffort:
    """Fills up `batch`; a `share` of what is left is kept for calls without objectives; `turns` has those waiting."""

    def __init__(
        self, batch: Batch, facts: EngineFacts, turns: Iterator[LocalCall], *, share: float, long_tokens: int
    ) -> None:
        self._batch = batch
        self._facts = facts
        self._turns = turns
        self._share = share
        self._long_tokens = long_tokens

    def go_on(self, running: Sequence[Candidate]) -> None:
        """Prompts that run, and nobody is admitted."""
        self._keep_share(any(not one.is_lost for one in running))
        select_in_order(self._batch, [one for one in running if one.is_lost])
        self._finish([one for one in running if not one.is_lost])

    def fill(self, running: Sequence[Candidate], lost: Sequence[tuple[float, Candidate]]) -> Iterator[LocalCall]:
        """Lost calls, then those without objectives; of both those that run go first. Returns those left, in order.

        When one whose turn it is finds no room, nobody takes what it waits for.
        """
        batch, head = self._batch, next(self._turns, None)
        first = [] if head is None else [self._candidate(head)]
        self._keep_share(bool(first) or any(not one.is_lost for one in running))
        select_in_order(batch, [one for one in running if one.is_lost])
        if not (first and batch.left_tokens and not batch.has_blocks(first[0])):
            self._add_lost(lost)
        self._finish([one for one in running if not one.is_lost])
        left: Iterator[LocalCall] = self._turns
        for candidate in chain(first, map(self._candidate, self._turns)):
            if not self._add(candidate):
                left = chain((candidate.call,), self._turns)
                break
        return chain(left, (one.call for _, one in lost))

    def _keep_share(self, wanted: bool) -> None:
        if wanted:
            self._batch.withheld_tokens = ceil(self._share * self._batch.left_tokens)

    def _finish(self, plain: Sequence[Candidate]) -> None:
        self._batch.withheld_tokens = 0
        select_in_order(self._batch, plain)

    def _add_lost(self, lost: Sequence[tuple[float, Candidate]]) -> None:
        """By response ratio; one that finds no room is passed by a few that are not far behind."""
        misfits, least_ratio = 0, 0.0
        for ratio, candidate in lost:
            if ratio < least_ratio or misfits > MOST_LOST_MISFITS:
                return
            if not self._add(candidate):
                misfits += 1
                least_ratio = max(least_ratio, ratio / PASS_RATIO)

    def _candidate(self, call: LocalCall) -> Candidate:
        cached = self._facts.cached_tokens(call)
        tokens = call.uncomputed_tokens - cached
        return Candidate(call, tokens, cached, waits=True, is_long=tokens >= self._long_tokens)

    def _add(self, candidate: Candidate) -> bool:
        tokens = self._batch.fit(candidate)
        if tokens:
            self._batch.add(candidate, tokens)
        return tokens > 0
