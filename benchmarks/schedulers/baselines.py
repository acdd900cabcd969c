"""What serving engines do today, each from its published description, as local schedulers."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.mixed_prompts import MAX_OUTPUT_TOKENS
from plait.policy.scheduling.plan import EngineFacts, LocalCall, LocalScheduler, Plan

ORCA_CALLS = 8
"""Orca's batch in AccelGen's section 3.1, after Orca's own evaluation."""
ORCA_SEQUENCE_TOKENS = 8192
"""The maximum sequence length that AccelGen's Orca reserves for every call."""


class SmallerBudget:
    """`scheduler` under a system-wide token budget below the engine's own (vLLM and Sarathi-Serve with `Fcfs`)."""

    def __init__(self, scheduler: LocalScheduler, budget_tokens: int) -> None:
        self._scheduler = scheduler
        self._budget_tokens = budget_tokens

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The scheduler's own plan, made with the smaller budget."""
        return self._scheduler.plan(now_s, waiting, running, _Budgeted(facts, self._budget_tokens))


class _Budgeted:
    """An engine's facts but for its budget."""

    def __init__(self, facts: EngineFacts, budget_tokens: int) -> None:
        self.max_batch_tokens = min(budget_tokens, facts.max_batch_tokens)
        self.max_running_calls = facts.max_running_calls
        self.in_flight = facts.in_flight
        self.free_blocks = facts.free_blocks
        self.cached_tokens = facts.cached_tokens
        self.blocks_needed = facts.blocks_needed
        self.blocks_freed = facts.blocks_freed
        self.loading = facts.loading
        self.shares_in_iteration = facts.shares_in_iteration
        self.stored_tokens = facts.stored_tokens
        self.block_key = facts.block_key
        self.shared_tokens = facts.shared_tokens


class Orca:
    """Iteration-level batching of at most 8 calls in the order of arrival; prompts are computed whole.

    A call is admitted once its prompt and the longest output fit beside what the others have reserved, and keeps that
    room to its end: nothing is ever preempted. `least_tokens` are reserved even for a call that cannot use them. The
    engine's budget must admit the longest prompt.
    """

    def __init__(self, kv_blocks: int, block_tokens: int, least_tokens: int = 0) -> None:
        self._kv_blocks = kv_blocks
        self._block_tokens = block_tokens
        self._least_tokens = least_tokens

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """All running calls, then arrivals until seats, reserved KV or the budget run out."""
        del now_s
        picks = [(call, call.uncomputed_tokens) for call in running]
        budget = facts.max_batch_tokens - sum(tokens for _, tokens in picks)
        room = self._kv_blocks - sum(self.reserved_blocks(call) for call in running)
        for call in waiting:
            tokens = call.uncomputed_tokens - facts.cached_tokens(call)
            room -= self.reserved_blocks(call)
            if room < 0 or tokens > budget or len(picks) >= min(ORCA_CALLS, facts.max_running_calls):
                break
            picks.append((call, tokens))
            budget -= tokens
        return Plan((), tuple(picks))

    def reserved_blocks(self, call: LocalCall) -> int:
        """Blocks for the prompt and the longest output, as far as the cache can hold them at all."""
        tokens = max(self._least_tokens, call.prompt_tokens + MAX_OUTPUT_TOKENS)
        return min(self._kv_blocks, -(-tokens // self._block_tokens))


class FastGen:
    """DeepSpeed-FastGen's dynamic split-fuse: decodes, then prompts, cut and fused to a constant forward size.

    As in DeepSpeed-MII: a prompt is scheduled only while all that is left of it fits the free KV; a decode that lacks a
    block waits; when nothing can be scheduled (a deadlock), everything is reset and recomputed.
    """

    def __init__(self, forward_tokens: int) -> None:
        self._forward_tokens = forward_tokens

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """Decodes, running prompts, then arrivals."""
        del now_s
        room = _Room(min(self._forward_tokens, facts.max_batch_tokens), facts)
        for call in running:
            if call.uncomputed_tokens == 1:
                room.take(call, 1, whole_tokens=1)
        prompts = [call for call in running if call.uncomputed_tokens > 1]
        for call in prompts:
            if not room.take(call, call.uncomputed_tokens, whole_tokens=call.uncomputed_tokens):
                return room.plan() if room.picks else _reset(running, facts, self._forward_tokens)
        seats = facts.max_running_calls - len(running)
        for call in waiting[:seats]:
            tokens = call.uncomputed_tokens - facts.cached_tokens(call)
            if not room.take(call, tokens, whole_tokens=tokens):
                break
        if running and not room.picks:
            return _reset(running, facts, self._forward_tokens)
        return room.plan()


class _Room:
    """What is left of a forward pass while it is composed."""

    def __init__(self, budget_tokens: int, facts: EngineFacts) -> None:
        self.picks: list[tuple[LocalCall, int]] = []
        self._budget_tokens = budget_tokens
        self._free_blocks = facts.free_blocks
        self._facts = facts

    def take(self, call: LocalCall, tokens: int, *, whole_tokens: int) -> bool:
        """Pick as much of `tokens` as the budget allows, if `whole_tokens` fit the free blocks."""
        tokens = min(tokens, self._budget_tokens)
        if tokens <= 0 or self._facts.blocks_needed(call, whole_tokens) > self._free_blocks:
            return False
        self._free_blocks -= self._facts.blocks_needed(call, tokens)
        self._budget_tokens -= tokens
        self.picks.append((call, tokens))
        return True

    def plan(self) -> Plan:
        """The forward pass as composed."""
        return Plan((), tuple(self.picks))


def _reset(running: Sequence[LocalCall], facts: EngineFacts, forward_tokens: int) -> Plan:
    """All KV given up but the first arrival's, which goes on: the others queue again in their order."""
    first, *others = running
    freed = facts.free_blocks + sum(facts.blocks_freed(call) for call in others)
    tokens = min(first.uncomputed_tokens, forward_tokens, facts.max_batch_tokens)
    picks = ((first, tokens),) if facts.blocks_needed(first, tokens) <= freed else ()
    return Plan(tuple(reversed(others)), picks)
