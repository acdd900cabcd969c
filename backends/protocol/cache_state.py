"""The cache-state report, `GET /cache_state?since=<cursor>&wait_ms=<n>`: the same on every engine.

See docs/design/residency.md.

A report is the net change since the cursor: apply `removed`, then `stored`. If `snapshot` is set, the report is the
whole state and replaces earlier reports. The engine sends a snapshot to the first request, after a restart (a new
`epoch`), and for a cursor that it no longer remembers. Blocks are tree blocks, named by
`plait.policy.prefix.block_hash`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

EngineKind = Literal["embedded", "vllm", "sglang"]
"""The adapter that reports. It decides how a call's annotations travel to the engine."""


BlockHash = Annotated[int, msgspec.Meta(ge=0)]
"""64 bits, unsigned."""


class StoredRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive stored blocks. The first follows `parent`; None: it starts a prompt."""

    parent: BlockHash | None
    hashes: list[BlockHash]


class KvState(msgspec.Struct, frozen=True):
    """The KV cache in engine blocks: all, empty ones, and those with cached prefixes that no running call uses."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int


class QueueState(msgspec.Struct, frozen=True):
    """Calls in the engine; `waiting_tokens` are the waiting calls' prompt tokens."""

    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    mean_queue_s: float = 0.0


class IterationState(msgspec.Struct, frozen=True):
    """Mean and longest of the last 128 iteration times, mean of the last 128 prefill chunks, current token budget."""

    mean_s: float = 0.0
    max_s: float = 0.0
    mean_chunk_tokens: float = 0.0
    budget_tokens: int = 0


class SchedulerState(msgspec.Struct, frozen=True):
    """The local scheduler: its name, the share of calls that met their SLO (None: no call had one), its preemptions."""

    policy: str = "fcfs"
    slo_attainment: float | None = None
    preemptions: int = 0


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """One report. `block_tokens` is the size of an engine block, `granularity_tokens` the size of a tree block."""

    engine: str
    kind: EngineKind
    epoch: str
    cursor: int
    model: str
    block_tokens: int
    granularity_tokens: int
    snapshot: bool
    stored: list[StoredRun]
    removed: list[BlockHash]
    kv: KvState
    queue: QueueState = QueueState()
    iteration: IterationState = IterationState()
    scheduler: SchedulerState = SchedulerState()

    @property
    def kv_free_tokens(self) -> int:
        """Tokens that fit into the empty blocks."""
        return self.kv.free_blocks * self.block_tokens
