"""The cache-state report, `GET /cache_state?since=<cursor>&wait_ms=<n>`: the same on every engine.

See docs/design/residency.md.

A report is the net change since the cursor: apply `removed`, then `stored`. With `snapshot` set it is the whole state
and replaces earlier reports. A snapshot answers the first request, a request after a restart (a new `epoch`), and a
cursor that the engine no longer remembers. Blocks are tree blocks, named by `plait.policy.prefix.block_hash`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

EngineKind = Literal["embedded", "vllm", "sglang"]
"""Which adapter reports: it decides how a call's annotations travel to the engine."""


BlockHash = Annotated[int, msgspec.Meta(ge=0)]
"""64 bits, unsigned."""


class StoredRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive stored blocks; the first follows `parent` (None: it is at the start of a prompt)."""

    parent: BlockHash | None
    hashes: list[BlockHash]


class KvState(msgspec.Struct, frozen=True):
    """The KV cache in engine blocks: in all, empty, and with cached prefixes that no running call uses."""

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
    """The engine's last 128 iterations: mean and longest time, mean prefill chunk, and the token budget in force."""

    mean_s: float = 0.0
    max_s: float = 0.0
    mean_chunk_tokens: float = 0.0
    budget_tokens: int = 0


class SchedulerState(msgspec.Struct, frozen=True):
    """The local scheduler: its policy's name, the share of calls that met their SLO (None: none had one)."""

    policy: str = "fcfs"
    slo_attainment: float | None = None
    preemptions: int = 0


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """One report; `block_tokens` is the engine's block, `granularity_tokens` the tree block it reports in."""

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
        """Room that no cached block fills."""
        return self.kv.free_blocks * self.block_tokens
