"""The local scheduler: which calls of one engine compute how many tokens in its next iteration (DESIGN 4.5).

One pure object that every engine adapter drives with `plan`. So far it runs first come, first served with chunked
prefill, as vLLM does; objectives and hit-ratio groups come behind the same interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class LocalCall:
    """A call inside an engine. `computed_tokens` have their KV in the cache: of the prompt, then of the output."""

    call_id: str
    arrived_s: float
    prompt_tokens: int
    computed_tokens: int = 0
    output_tokens: int = 0

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens to compute before the next output token: what is left of the prompt, or the last output token."""
        return self.prompt_tokens + self.output_tokens - self.computed_tokens


class EngineFacts(Protocol):
    """What the engine knows and the plan depends on."""

    @property
    def max_batch_tokens(self) -> int:
        """The most new tokens one iteration may compute."""

    @property
    def max_running_calls(self) -> int:
        """The most calls that may run at once."""

    @property
    def free_blocks(self) -> int:
        """KV blocks that no running call uses; cached ones count, since they can be evicted."""

    def cached_tokens(self, call: LocalCall) -> int:
        """Tokens of a waiting call's prompt that are in the cache now."""

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        """Free blocks that computing `new_tokens` more of a call takes, cached ones it would pin included."""

    def blocks_freed(self, call: LocalCall) -> int:
        """Blocks that preempting a running call would set free."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Intent for one iteration, in order: calls to preempt first, then (call, tokens to compute) picks."""

    preempt: tuple[LocalCall, ...]
    picks: tuple[tuple[LocalCall, int], ...]


class LocalScheduler(Protocol):
    """Deterministic: the same arguments give the same plan."""

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The next iteration's plan; never beyond the budget, the free blocks or the running limit.

        `waiting` and `running` are in the order of arrival, and every running call has something to compute.
        """


class Fcfs:
    """First come, first served with chunked prefill: running calls first, then waiting ones until the first misfit."""

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """Decodes and running prefills keep their place; who lacks a block preempts the latest arrival."""
        del now_s
        budget, free = facts.max_batch_tokens, facts.free_blocks
        staying, preempted, picks = list(running), [], []
        position = 0
        while position < len(staying) and budget > 0:
            call = staying[position]
            tokens = min(call.uncomputed_tokens, budget)
            need = facts.blocks_needed(call, tokens)
            while need > free and len(staying) > position + 1:  # the latest arrival goes first
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
        if not preempted:
            seats = facts.max_running_calls - len(staying)
            picks += _admit(waiting, seats, budget, free, facts)
        return Plan(tuple(preempted), tuple(picks))


def _admit(
    waiting: Sequence[LocalCall], seats: int, budget: int, free: int, facts: EngineFacts
) -> list[tuple[LocalCall, int]]:
    admitted = []
    for call in waiting[: max(0, seats)]:
        tokens = min(call.uncomputed_tokens - facts.cached_tokens(call), budget)
        need = facts.blocks_needed(call, tokens)
        if tokens <= 0 or need > free:
            break
        admitted.append((call, tokens))
        budget -= tokens
        free -= need
    return admitted
