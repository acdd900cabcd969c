"""The cache-state report, `GET /cache_state?since=<cursor>&wait_ms=<n>`: the same on every engine.

See docs/design/residency.md.

A report is the net change since the cursor: apply `removed`, then `stored`. If `snapshot` is set, the report is the
whole state and replaces earlier reports. The engine sends a snapshot to the first request, after a restart (a new
`epoch`), and for a cursor that it no longer remembers. Blocks are tree blocks, named by
`plait.policy.prefix.block_hash`.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec

from plait.backends.protocol.chat_rendering import ChatRendering
from plait.backends.protocol.dialects import ADAPTED
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint

Tier = Literal["reports", "order", "chunks"]
TIERS: Final[tuple[Tier, ...]] = ("reports", "order", "chunks")
"""What an adapter does in an engine, each with all before it: `reports` tells of cache and calls, and takes objectives;
`order` sets the queue's order and the budget; `chunks` limits each call's tokens, and preempts.
"""


BlockHash = Annotated[int, msgspec.Meta(ge=0)]
"""64 bits, unsigned."""


MAX_NAME = 1_024
"""The longest name in a report, in characters."""

MAX_BLOCKS = 2**31
"""More blocks than any KV cache has."""

MAX_CALLS = 2**16
"""More calls than any engine has had since the last report."""

MAX_TOKENS = 2**28
"""A longer prompt than any."""

MAX_COUNT = 2**53
MAX_TIME_S = 1e9
ROUNDING_S = 1e-3
"""A mean that is kept up by adding and subtracting may end below zero by less than this."""

MAX_TIERS = 8
"""More tiers than any engine has."""

_TIER_NAME: Final = re.compile(r"[a-z0-9_-]{1,64}")

SLACK = 4
"""A report may list so many times the blocks that fit the cache: changes pile up between two polls."""


class StoredRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive stored blocks. The first follows `parent`; None: it starts a prompt."""

    parent: BlockHash | None
    hashes: list[BlockHash]


class LowerTier(msgspec.Struct, frozen=True):
    """A tier of the cache below the accelerator: `host` (memory), `disk` or `remote`, by its name in `tier`.

    `stored` and `removed` are blocks whose fastest copy is there, as those of the report are the accelerator's. A block
    that moves is removed from one tier and stored in another one. `total_blocks` engine blocks fit (0: not known), of
    which `free_blocks` are empty (None: not known). So far, `loaded_tokens` were brought back from there, for which its
    link was busy for `loading_s`.
    """

    tier: str
    total_blocks: int = 0
    free_blocks: int | None = None
    stored: list[StoredRun] = []
    removed: list[BlockHash] = []
    loaded_tokens: int = 0
    loading_s: float = 0.0


class OutstandingCall(msgspec.Struct, frozen=True, array_like=True):
    """A call in the engine, sent by the gateway of this id. `number` names it within the engine's epoch.

    `missed_tokens` are those of its prompt that are not cached; 0 once it `is_computed`. It `is_urgent` if it has a
    TTFT. `hashes` are the tree blocks of its prompt, from the first on; none if it is computed: then they are stored.
    """

    number: int
    gateway: str
    prompt_tokens: int
    missed_tokens: int
    is_urgent: bool
    is_computed: bool
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
    """The local scheduler: its name, the share of calls that met their SLO (None: no call had one), its preemptions.

    `takes_objectives` says that the objectives of its calls may change (`POST /call_objectives`). `slots` is how many
    calls may run at a time; 0: not known. `tier` is one of `TIERS`, or of a later adapter's; adapters without tiers do
    all. In `reports` the engine schedules, and the name is `engine`.
    """

    policy: str = "fcfs"
    slo_attainment: float | None = None
    preemptions: int = 0
    takes_objectives: bool = False
    slots: int = 0
    tier: str = "chunks"


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """One report, of an adapter for a `kind` of `dialects.ADAPTED`.

    `block_tokens` is the size of an engine block, `granularity_tokens` the size of a tree block.

    `tokenizer` is the fingerprint of the engine's tokenizer; None if the engine does not know it. `chats` says how it
    renders chats; None if it does not say.

    `calls` came or were computed since the cursor. `ended` are the numbers of those that ended. A snapshot has all
    calls. None: the engine does not say.

    `tiers` are those below the accelerator, the fastest first.
    """

    engine: str
    kind: str
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
    tokenizer: TokenizerFingerprint | None = None
    chats: ChatRendering | None = None
    calls: list[OutstandingCall] | None = None
    ended: list[int] = []
    tiers: list[LowerTier] = []

    def __post_init__(self) -> None:
        if self.kind not in ADAPTED:
            raise ValueError(f"kind = {self.kind[:MAX_NAME]!r}: expected one of {', '.join(sorted(ADAPTED))}")

    def check(self) -> None:
        """Raise ValueError if the report cannot be true: sizes, counts and times are within what an engine can have."""
        kv, queue, iteration = self.kv, self.queue, self.iteration
        blocks = sum(len(run.hashes) for run in self.stored)
        counts = (
            *(self.cursor, queue.waiting, queue.running, queue.waiting_tokens),
            *(iteration.budget_tokens, self.scheduler.slots),
        )
        times_s = (queue.mean_queue_s, iteration.mean_s, iteration.max_s)
        problems = {
            "its names are longer than any": max(map(len, self._names)) > MAX_NAME,
            "a block has no tokens": self.block_tokens < 1 or self.granularity_tokens < 1,
            "the KV cache's blocks do not add up": not (
                0 <= kv.free_blocks <= kv.total_blocks <= MAX_BLOCKS and 0 <= kv.cached_blocks <= kv.total_blocks
            ),
            "it stored more than fits the KV cache": (
                blocks * self.granularity_tokens > SLACK * kv.total_blocks * self.block_tokens
            ),
            "its tiers cannot be": not self._tiers_can_be_true,
            "a count is negative or too large": not all(0 <= count <= MAX_COUNT for count in counts),
            "its calls cannot be": not self._calls_can_be_true,
            "a time is negative or not finite": not all(-ROUNDING_S <= time_s < MAX_TIME_S for time_s in times_s),
        }
        found = [problem for problem, holds in problems.items() if holds]
        if found:
            raise ValueError(f"engine {self.engine[:MAX_NAME]}'s report cannot be true: {'; '.join(found)}")

    @property
    def _calls_can_be_true(self) -> bool:
        calls = self.calls or ()
        return len(calls) + len(self.ended) <= MAX_CALLS and all(
            0 <= call.missed_tokens <= call.prompt_tokens <= MAX_TOKENS
            and len(call.hashes) * self.granularity_tokens <= call.prompt_tokens
            and len(set(call.hashes)) == len(call.hashes)
            and len(call.gateway) <= MAX_NAME
            for call in calls
        )

    @property
    def _tiers_can_be_true(self) -> bool:
        names = [tier.tier for tier in self.tiers]
        return len(set(names)) == len(names) <= MAX_TIERS and all(
            _TIER_NAME.fullmatch(tier.tier)
            and 0 <= (tier.free_blocks or 0) <= tier.total_blocks <= MAX_BLOCKS
            and 0 <= tier.loaded_tokens <= MAX_COUNT
            and -ROUNDING_S <= tier.loading_s < MAX_TIME_S
            and sum(len(run.hashes) for run in tier.stored) * self.granularity_tokens
            <= SLACK * (tier.total_blocks * self.block_tokens or MAX_BLOCKS)
            for tier in self.tiers
        )

    @property
    def _names(self) -> tuple[str, ...]:
        tokenizer = () if self.tokenizer is None else msgspec.structs.astuple(self.tokenizer)
        chats = () if self.chats is None else (self.chats.version, self.chats.requested)
        return (self.engine, self.epoch, self.model, self.scheduler.tier, *tokenizer, *chats)

    @property
    def kv_free_tokens(self) -> int:
        return self.kv.free_blocks * self.block_tokens
