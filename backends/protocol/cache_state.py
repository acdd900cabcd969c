"""The cache-state report, `GET /cache_state?since=<cursor>&wait_ms=<n>`: the same on every engine.

See docs/design/residency.md.

A report is the net change since the cursor: apply `removed`, then `stored`. If `snapshot` is set, the report is the
whole state and replaces earlier reports. The engine sends a snapshot to the first request, after a restart (a new
`epoch`), and for a cursor that it no longer remembers. Blocks are tree blocks, named by
`plait.policy.prefix.block_hash`.
"""

from __future__ import annotations

import re
from math import ceil, inf
from typing import Annotated, Final, Literal

import msgspec

from plait.backends.protocol.chat_rendering import ChatRendering
from plait.backends.protocol.dialects import ADAPTED
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint

Tier = Literal["reports", "order", "chunks"]
TIERS: Final[tuple[Tier, ...]] = ("reports", "order", "chunks")
"""What an adapter does in its engine. `reports`: report the cache and calls, take objectives. `order`: also set the
queue's order and the token budget. `chunks`: also limit each call's tokens, and preempt.
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
"""A running mean, kept by adding and subtracting, may fall below zero by less than this."""

MAX_RANKS = 2**10
"""More data-parallel ranks than any server has."""

MAX_TIERS = 8
"""More tiers than any engine has."""

_TIER_NAME: Final = re.compile(r"[a-z0-9_-]{1,64}")

SLACK = 4
"""How many times the cache's size a report may list as stored: changes pile up between two polls."""


class StoredRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive stored blocks. The first follows `parent`; None: it starts a prompt."""

    parent: BlockHash | None
    hashes: list[BlockHash]


class LowerTier(msgspec.Struct, frozen=True):
    """A tier of the KV cache below the accelerator. A block that moves is removed from one tier, stored in another."""

    tier: str
    """`host` (memory), `disk` or `remote`."""
    total_blocks: int = 0
    """Engine blocks that fit; 0: not known."""
    free_blocks: int | None = None
    """Empty ones; None: not known."""
    stored: list[StoredRun] = []
    """Tree blocks whose fastest copy is now in this tier."""
    removed: list[BlockHash] = []
    """Tree blocks evicted from this tier, or moved to another."""
    loaded_tokens: int = 0
    """Tokens brought back to the accelerator since the engine's start."""
    loading_s: float = 0.0
    """How long the tier's link was busy with them."""


class HitEnds(msgspec.Struct, frozen=True):
    """Where a prefix hit can end, on an engine whose layers with windows or states keep what it needs at some places.

    An end inside a tree block is named by the `whole_hash` of all tokens before it.
    """

    align_tokens: int
    """Hits are multiples of this."""
    interval_tokens: int = 0
    """What a call leaves: an end at each multiple of this (0: none), at the last multiple of `align_tokens` before its
    prompt's last token, and where it left a longer prefix that it shares with others.
    """
    opened: list[tuple[BlockHash, int]] = []
    """(last, n): a hit can end after each of the n consecutive tree blocks up to the `last`."""
    inside: list[tuple[BlockHash, int, BlockHash]] = []
    """(tree block before, tokens after it, name) of the ends inside blocks."""
    closed: list[BlockHash] = []
    """Names of ends inside blocks, and tree blocks still stored, at which a hit can no longer end."""


class OutstandingCall(msgspec.Struct, frozen=True, array_like=True):
    """A call in the engine, for gateways other than its own."""

    number: int
    """Names the call within the engine's epoch."""
    gateway: str
    """The id of the gateway that sent the call."""
    prompt_tokens: int
    missed_tokens: int
    """Prompt tokens that are not cached; 0 once the prompt is computed."""
    is_urgent: bool
    """Whether the call has a TTFT."""
    is_computed: bool
    """Whether the call has its first token."""
    hashes: list[BlockHash]
    """The prompt's tree blocks, from the first on. Empty once computed: the report then lists them as stored."""
    is_line: bool = False
    """Whether it is a line of a batch, for which nobody waits."""


class KvGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers of one kind, which take blocks of their own for each call."""

    block_tokens: int
    most_blocks: int = 0
    """The most blocks that a call holds, however long: a window, or a state. 0: no bound."""


class KvState(msgspec.Struct, frozen=True):
    """The size of the KV cache, in engine blocks."""

    total_blocks: int
    free_blocks: int
    """Empty blocks."""
    cached_blocks: int
    """Blocks with a cached prefix that no running call uses."""
    groups: list[KvGroup] = []
    """The groups of layers that share the blocks. Empty: a call takes a block for each `block_tokens`."""

    def tokens(self, blocks: int, block_tokens: int, call_tokens: float) -> int:
        """How many tokens of calls of some length fit into engine blocks.

        The length matters only with `groups`. The blocks of a call grow ever slower with its length, so calls of
        different lengths take at most the blocks of as many calls of the mean length.
        """
        if not self.groups:
            return blocks * block_tokens
        whole = max(group.block_tokens for group in self.groups)
        tokens = whole * max(1, ceil(call_tokens / whole))  # as with one group, no block is partly filled
        of_call = (min(-(-tokens // group.block_tokens), group.most_blocks or inf) for group in self.groups)
        return int(blocks * tokens / sum(of_call))


class QueueState(msgspec.Struct, frozen=True):
    """Counts of calls in the engine. `waiting_tokens` sums the prompts of the waiting ones."""

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
    """The state of the engine's local scheduler."""

    policy: str = "fcfs"
    """The scheduler's name; `engine` in the tier `reports`, where the engine schedules by itself."""
    slo_attainment: float | None = None
    """The share of the latest calls with objectives that met all of them; None: there was none."""
    preemptions: int = 0
    """Preempted calls since the engine's start."""
    takes_objectives: bool = False
    """Whether objectives of calls may change while they run (`POST /call_objectives`)."""
    slots: int = 0
    """How many calls may run at a time; 0: not known."""
    tier: str = "chunks"
    """One of `TIERS`, or a later adapter's. An adapter from before tiers reports none and does everything."""


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    kind: str
    """One of `dialects.ADAPTED`."""
    epoch: str
    """Names one start of the engine. Cursors and call numbers are valid within it."""
    cursor: int
    """The engine's changes so far: the `since` of the next request."""
    model: str
    block_tokens: int
    """The size of an engine block."""
    granularity_tokens: int
    """The size of a tree block."""
    snapshot: bool
    """Whether the report is the whole state instead of the changes."""
    stored: list[StoredRun]
    """Tree blocks that the accelerator has cached since the cursor."""
    removed: list[BlockHash]
    """Tree blocks that the accelerator has lost since the cursor."""
    kv: KvState
    queue: QueueState = QueueState()
    iteration: IterationState = IterationState()
    scheduler: SchedulerState = SchedulerState()
    tokenizer: TokenizerFingerprint | None = None
    """None if the engine cannot read its tokenizer."""
    chats: ChatRendering | None = None
    """How the engine renders chats; None from an adapter that does not report it."""
    calls: list[OutstandingCall] | None = None
    """Other gateways' calls that arrived or got a first token since the cursor. None: the engine reports none."""
    ended: list[int] = []
    """Numbers of such calls that ended since the cursor."""
    tiers: list[LowerTier] = []
    """The tiers below the accelerator, the fastest first."""
    ends: HitEnds | None = None
    """None: a hit can end after each block."""
    untold: str = ""
    """What of its cache the engine does not tell, so that the cache has to be estimated; empty: nothing."""
    rank: int = 0
    """The data-parallel rank whose cache and calls these are, from 0."""
    ranks: int = 1
    """How many ranks the server at this address has."""

    def __post_init__(self) -> None:
        if self.kind not in ADAPTED:
            raise ValueError(f"kind = {self.kind[:MAX_NAME]!r}: expected one of {', '.join(sorted(ADAPTED))}")

    def check(self) -> None:
        """Raise ValueError if a size, count or time in the report is beyond what an engine can have."""
        kv, queue, iteration = self.kv, self.queue, self.iteration
        counts = (
            *(self.cursor, queue.waiting, queue.running, queue.waiting_tokens),
            *(iteration.budget_tokens, self.scheduler.slots),
        )
        times_s = (queue.mean_queue_s, iteration.mean_s, iteration.max_s)
        problems = {
            "its names are longer than any": max(map(len, self._names)) > MAX_NAME,
            "a block has no tokens": min(self.block_tokens, self.granularity_tokens) < 1
            or not all(0 < group.block_tokens <= MAX_TOKENS and group.most_blocks >= 0 for group in kv.groups),
            "the KV cache's blocks do not add up": not (
                0 <= kv.free_blocks <= kv.total_blocks <= MAX_BLOCKS and 0 <= kv.cached_blocks <= kv.total_blocks
            ),
            "it stored more than fits the KV cache": (not self._fit(self.stored, kv.total_blocks)),
            "its tiers cannot be": not self._tiers_can_be_true,
            "its hits cannot end there": not self._ends_can_be_true,
            "a count is negative or too large": not all(0 <= count <= MAX_COUNT for count in counts),
            "its calls cannot be": not self._calls_can_be_true,
            "its ranks cannot be": not 0 <= self.rank < self.ranks <= MAX_RANKS,
            "a time is negative or not finite": not all(-ROUNDING_S <= time_s < MAX_TIME_S for time_s in times_s),
        }
        found = [problem for problem, holds in problems.items() if holds]
        if found:
            raise ValueError(f"engine {self.engine[:MAX_NAME]}'s report cannot be true: {'; '.join(found)}")

    def _fit(self, stored: list[StoredRun], total_blocks: int) -> bool:
        """Whether a tier may have stored so much: at most `ends` tree blocks end in an engine block."""
        ends = -(-self.block_tokens // max(1, self.granularity_tokens))
        return sum(len(run.hashes) for run in stored) <= SLACK * total_blocks * ends

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
            and self._fit(tier.stored, tier.total_blocks or MAX_BLOCKS)
            for tier in self.tiers
        )

    @property
    def _ends_can_be_true(self) -> bool:
        ends = self.ends
        return ends is None or (
            0 < ends.align_tokens <= MAX_TOKENS
            and 0 <= ends.interval_tokens <= MAX_TOKENS
            and all(0 < blocks <= MAX_BLOCKS for _, blocks in ends.opened)
            and all(0 < tokens < self.granularity_tokens for _, tokens, _ in ends.inside)
        )

    @property
    def _names(self) -> tuple[str, ...]:
        tokenizer = () if self.tokenizer is None else msgspec.structs.astuple(self.tokenizer)
        chats = () if self.chats is None else (self.chats.version, self.chats.requested)
        return (self.engine, self.epoch, self.model, self.untold, self.scheduler.tier, *tokenizer, *chats)
