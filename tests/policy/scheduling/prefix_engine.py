"""An engine with a prefix cache of unlimited size, whose blocks can be found `lag` iterations after their computation.

With a lag of 0, later picks of the same iteration find them, as in vLLM and the embedded engine. With a lag of 1 the
next iteration finds them, and with 2 the one after it, as in SGLang without and with overlapping iterations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from plait.policy.scheduling.plan import LocalCall, LocalScheduler, Plan

BLOCK_TOKENS = 4

Key = tuple[int, ...]


@dataclass
class PrefixEngine:
    """`contents` are the prompts' tokens. `computed_tokens` counts the prompt tokens of all iterations."""

    scheduler: LocalScheduler
    lag: int
    max_batch_tokens: int = 20
    max_running_calls: int = 50
    free_blocks: int = 10_000
    contents: dict[str, Key] = field(default_factory=dict)
    waiting: list[LocalCall] = field(default_factory=list)
    running: list[LocalCall] = field(default_factory=list)
    computed_tokens: int = 0
    now_s: float = 0.0
    stored: set[Key] = field(default_factory=set)
    computing: deque[list[Key]] = field(default_factory=deque)

    in_flight = None
    loading: tuple[LocalCall, ...] = ()

    @property
    def shares_in_iteration(self) -> bool:
        return self.lag == 0

    def add(self, call: LocalCall, content: Key) -> None:
        self.contents[call.call_id] = content
        self.waiting.append(call)

    def end(self, call: LocalCall) -> None:
        (self.running if call in self.running else self.waiting).remove(call)

    def step(self) -> Plan:
        """Plan and compute an iteration. A call ends with its second output token."""
        plan = self.scheduler.plan(self.now_s, self.waiting, self.running, self)
        computed: list[Key] = []
        self.computing.append(computed)
        for call in plan.preempt:
            self.running.remove(call)
            self.waiting.insert(0, call)
            call.computed_tokens = 0
        for call, planned_tokens in plan.picks:
            tokens = planned_tokens
            if call in self.waiting:
                call.computed_tokens = self.cached_tokens(call)
                tokens = min(tokens, call.uncomputed_tokens)
                self.waiting.remove(call)
                self.running.append(call)
            self._compute(call, tokens, computed)
        while len(self.computing) > max(0, self.lag - 1):
            self.stored.update(self.computing.popleft())
        self.now_s += 0.05
        return plan

    def cached_tokens(self, call: LocalCall) -> int:
        blocks = 0
        while (key := self.block_key(call, blocks * BLOCK_TOKENS)) in self.stored and key != self._whole(call):
            blocks += 1
        return blocks * BLOCK_TOKENS

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        del call
        return -(-new_tokens // BLOCK_TOKENS)

    def blocks_freed(self, call: LocalCall) -> int:
        return call.computed_tokens // BLOCK_TOKENS

    def stored_tokens(self, call: LocalCall) -> int:
        return min(self.cached_tokens(call), call.computed_tokens)

    def block_key(self, call: LocalCall, tokens: int) -> Key | None:
        end, content = (tokens // BLOCK_TOKENS + 1) * BLOCK_TOKENS, self.contents[call.call_id]
        return content[:end] if end <= len(content) else None

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        blocks = 0
        while (key := self.block_key(call, blocks * BLOCK_TOKENS)) is not None and key != self._whole(call):
            if key != self.block_key(other, blocks * BLOCK_TOKENS):
                break
            blocks += 1
        return blocks * BLOCK_TOKENS

    def _whole(self, call: LocalCall) -> Key:
        return self.contents[call.call_id]

    def _compute(self, call: LocalCall, tokens: int, computed: list[Key]) -> None:
        assert 0 < tokens <= call.uncomputed_tokens
        start, end = call.computed_tokens, min(call.computed_tokens + tokens, call.prompt_tokens)
        call.computed_tokens += tokens
        self.computed_tokens += max(0, end - start)
        content = self.contents[call.call_id]
        keys = [content[: block * BLOCK_TOKENS] for block in range(start // BLOCK_TOKENS + 1, end // BLOCK_TOKENS + 1)]
        computed += keys
        if not self.lag:
            self.stored.update(keys)
        if not call.uncomputed_tokens:
            call.output_tokens += 1
            if call.output_tokens == 2:
                self.running.remove(call)
