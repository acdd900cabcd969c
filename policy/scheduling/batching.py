"""An iteration while a plan fills it: its calls, and the compute, KV blocks and sequence slots that are left.

A call's compute demand is its uncached tokens. Its KV demand is the whole new blocks for these tokens. Prompts are cut
where the budget ends (dynamic chunking). Long prompts are also cut where the free blocks end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from plait.policy.scheduling.chunking import Budget
from plait.policy.scheduling.leaders import Leaders
from plait.policy.scheduling.plan import EngineFacts, LocalCall


@dataclass(slots=True, eq=False)
class Candidate:
    """A call that could compute `tokens` after its `context_tokens`."""

    call: LocalCall
    tokens: int
    context_tokens: int
    waits: bool
    """The call does not run yet."""
    remaining_s: float = inf
    """T_r, as in `slo.Timer`; infinite for a best-effort call."""
    due_s: float | None = None
    """The time until the next token is due, as in `slo.Timer`."""
    is_long: bool = False
    missed_slo: bool = False
    """The TTFT or JCT can no longer be met."""

    @property
    def loses_nothing(self) -> bool:
        """Whether the call is best-effort or has missed its SLO."""
        return self.missed_slo or self.remaining_s == inf


Decode = tuple[LocalCall, int, int]
"""(running call past its prompt, tokens to compute, tokens in the cache). Few plans make a `Candidate` of it."""


class Batch:
    """The calls of one iteration, and the room that is left in it.

    - `picks`: the tokens of each call; `started`: the waiting calls among them; `preempted`: the calls that make room.
    - `paused`: whether running decodes were left out.
    - `arrivals_slack_s`: calls with at least this slack end within `arrivals_limit_s`, since others may arrive.
    - `first_token_limit_s`: the time limit for first tokens that are due sooner. The budget's limit may be shorter.
    - `floor_tokens`: may be computed even beyond the time limit.
    - `reserve_tokens`: the part of the tokens left that is kept for other calls.
    - `unreserved_blocks`: the `free_blocks` less those reserved for running calls. A prompt starts only if all its
      blocks fit into them. Otherwise prompts begun would compete for blocks, and the preempted ones would repeat work.
    """

    def __init__(self, budget: Budget, facts: EngineFacts, free_slots: int) -> None:
        self.budget = budget
        self.free_blocks = facts.free_blocks
        self.unreserved_blocks = facts.free_blocks
        self.free_slots = free_slots
        self.arrivals_slack_s = self.arrivals_limit_s = self.first_token_limit_s = inf
        self.floor_tokens = 0
        self.reserve_tokens = 0
        self.picks: dict[LocalCall, int] = {}
        self.started: list[Candidate] = []
        self.preempted: list[LocalCall] = []
        self.paused = False
        self.leaders = Leaders(facts)
        self._facts = facts
        self._changes = 0
        self._left_state: tuple[int, float, int] | None = None
        self._left_tokens = 0

    @property
    def left_tokens(self) -> int:
        """Prompt tokens that still fit; cached until the batch changes, because it is read often."""
        state = (self._changes, self.budget.limit_s, self.floor_tokens)
        if state != self._left_state:
            self._left_state, self._left_tokens = state, self._left()
        return self._left_tokens

    def _left(self, limit_s: float | None = None) -> int:
        return self.budget.room(self._facts.max_batch_tokens, 0, self.floor_tokens, limit_s)

    def _limit_s(self, candidate: Candidate) -> float | None:
        """The time limit of the iteration for a candidate; None: the budget's, whose tokens left are known."""
        budget_s = self.budget.limit_s
        if candidate.remaining_s >= self.arrivals_slack_s:
            limit_s = min(self.arrivals_limit_s, budget_s)
        elif candidate.due_s is None or candidate.missed_slo:
            return None
        else:
            limit_s = self.first_token_limit_s
        return None if limit_s == budget_s else limit_s

    def fit(self, candidate: Candidate) -> int:
        """How many of the candidate's tokens fit.

        All tokens of a waiting call must fit into the unreserved blocks. If blocks are short, a long prompt is cut to
        the free blocks, and any other call gets no tokens.
        """
        if candidate.waits and self.free_slots <= 0:
            return 0
        limit_s = self._limit_s(candidate)
        tokens = self.budget.room(candidate.tokens, candidate.context_tokens, self.floor_tokens, limit_s)
        if self.reserve_tokens and tokens:
            left_tokens = self.left_tokens if limit_s is None else self._left(limit_s)
            tokens = max(0, min(tokens, left_tokens - self.reserve_tokens))
        if not tokens:
            return 0
        if candidate.waits and not self.has_blocks(candidate):
            return 0
        if self._facts.blocks_needed(candidate.call, tokens) <= self.free_blocks:
            return tokens
        return self._most_for_blocks(candidate.call, tokens) if candidate.is_long else 0

    def has_blocks(self, candidate: Candidate) -> bool:
        """Whether the unreserved blocks suffice for all tokens of a waiting call."""
        return self._facts.blocks_needed(candidate.call, candidate.tokens) <= self.unreserved_blocks

    def add(self, candidate: Candidate, tokens: int) -> None:
        """Compute `tokens` of the candidate, at most as many as `fit` returned.

        If these are all its tokens, the time until the call's next token is due limits the iteration.
        """
        self._changes += 1
        self.free_blocks -= self._facts.blocks_needed(candidate.call, tokens)
        if candidate.waits:
            self.unreserved_blocks -= self._facts.blocks_needed(candidate.call, candidate.tokens)
            self.free_slots -= 1
            self.started.append(candidate)
        self.budget.take(tokens, candidate.context_tokens)
        self.floor_tokens = max(0, self.floor_tokens - tokens)
        self.picks[candidate.call] = tokens
        self._lead(candidate, tokens)
        self._limit_to_due(candidate, tokens)

    def add_decodes(self, decodes: Sequence[Decode], tokens: int, blocks: int) -> None:
        """Compute all `decodes`, which take `tokens` and `blocks` in all."""
        self._changes += 1
        self.free_blocks -= blocks
        self.budget.take_decodes(tokens, sum([context_tokens for _, _, context_tokens in decodes]))
        self.picks |= {call: tokens for call, tokens, _ in decodes}

    def remove(self, candidate: Candidate) -> None:
        self._changes += 1
        tokens = self.picks.pop(candidate.call)
        self.free_blocks += self._facts.blocks_needed(candidate.call, tokens)
        self.budget.give_back(tokens, candidate.context_tokens)

    def extend(self, candidate: Candidate) -> None:
        """Compute more tokens of a truncated call, as many as fit. With all its tokens, it limits the iteration."""
        self._changes += 1
        given = self.picks[candidate.call]
        self.budget.give_back(given, candidate.context_tokens)
        tokens = max(given, self.budget.room(candidate.tokens, candidate.context_tokens, self.floor_tokens))
        blocks = self._facts.blocks_needed(candidate.call, tokens) - self._facts.blocks_needed(candidate.call, given)
        if blocks > self.free_blocks:
            tokens = given
        else:
            self.free_blocks -= blocks
        self.budget.take(tokens, candidate.context_tokens)
        self.picks[candidate.call] = tokens
        self._lead(candidate, tokens)
        self._limit_to_due(candidate, tokens)

    def preempt(self, call: LocalCall) -> None:
        """Preempt a running call, which frees its blocks and its sequence slot."""
        freed = self._facts.blocks_freed(call)
        self.preempted.append(call)
        self.free_blocks += freed
        self.unreserved_blocks += freed
        self.picks.pop(call, None)
        self.leaders.remove(call)
        self.free_slots += 1

    def limit(self, slo_s: float) -> None:
        """End the iteration within `slo_s`, unless the batch takes longer already."""
        if self.budget.time_s() <= slo_s:
            self.budget.limit_s = min(self.budget.limit_s, slo_s)
            self.first_token_limit_s = min(self.first_token_limit_s, slo_s)

    def limit_patient(self, slo_s: float) -> None:
        """End the iteration within `slo_s`, unless first tokens are due that make it longer."""
        self.budget.limit_s = min(self.budget.limit_s, slo_s)

    def leave_to_arrivals(self, slack_s: float | None, limit_s: float) -> None:
        """Take calls with at least the TTFT slack of arrivals only as long as the iteration ends within `limit_s`."""
        if slack_s is not None:
            self.arrivals_slack_s, self.arrivals_limit_s = slack_s, limit_s

    def limit_backlog(self, slo_s: float, tokens: int) -> None:
        """End the iteration within `slo_s`, but allow up to `tokens` more of the tokens that fit now."""
        self.floor_tokens = max(self.floor_tokens, min(tokens, self.left_tokens))
        self.budget.limit_s = min(self.budget.limit_s, slo_s)

    def _lead(self, candidate: Candidate, tokens: int) -> None:
        stored = candidate.context_tokens if candidate.waits else self._facts.stored_tokens(candidate.call)
        self.leaders.add(candidate.call, stored, candidate.context_tokens + tokens)

    def _limit_to_due(self, candidate: Candidate, tokens: int) -> None:
        if candidate.due_s is not None and tokens == candidate.tokens:
            self.limit(candidate.due_s)

    def _most_for_blocks(self, call: LocalCall, tokens: int) -> int:
        """The most tokens whose blocks are free, after keeping one block for the next decode of each call picked."""
        blocks_needed, free_blocks = self._facts.blocks_needed, self.free_blocks - len(self.picks)
        low, high = 0, tokens
        while low < high - 1:
            middle = (low + high) // 2
            if blocks_needed(call, middle) <= free_blocks:
                low = middle
            else:
                high = middle
        return low
