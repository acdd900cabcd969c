"""A call in the embedded engine, and its output tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from plait.lab.embedded.hash_chain import HashChain
from plait.policy.scheduling.plan import LocalCall


@dataclass(slots=True, eq=False)
class EmbeddedCall(LocalCall):
    chain: HashChain = field(kw_only=True)
    """The hashes of the KV blocks."""
    tree_chain: HashChain = field(kw_only=True)
    final_output_tokens: int = field(kw_only=True)
    """Where the output ends. The scheduler may only know the call's limit."""
    sent_tokens: int = field(default=0, kw_only=True)
    """The output so far, without the tokens that are in flight or planned."""
    output: Iterator[int] = field(default_factory=lambda: repeat(0), kw_only=True)
    blocks: list[int] = field(default_factory=list, kw_only=True)
    """The KV blocks while the call runs."""
    registered_blocks: int = field(default=0, kw_only=True)
    """How many of them other calls can hit."""
    cached_tokens: int | None = field(default=None, kw_only=True)
    """The hit at the first admission, as in vLLM's `usage`."""
    received_s: float | None = field(default=None, kw_only=True)
    """When the engine received the call, which can be after its zero."""
    matched_blocks: int = field(default=0, kw_only=True)
    """The leading blocks that were cached at the last look-up."""
    loadable_blocks: int = field(default=0, kw_only=True)
    """The blocks after these that lower tiers had."""
    prompt: Sequence[int] = field(default=(), kw_only=True)
    """The tokens of the prompt, which an engine with a sliding window needs."""
    hit_blocks: int = field(default=0, kw_only=True)
    """The part of the matched blocks that a hit takes beside a sliding window."""
    searched_at: int = field(default=-1, kw_only=True)
    """`EngineEnds.changes` when the hit was searched."""
    window_blocks: list[int] = field(default_factory=list, kw_only=True)
    """The window's KV blocks while the call runs, up to the same place as `blocks`."""
    settled_tokens: int = field(default=0, kw_only=True)
    """The tokens computed before the call's last iteration."""
    kept: list[int] = field(default_factory=list, kw_only=True)
    """KV blocks that must not be evicted while the call waits."""
    loaded_tokens: int = field(default=0, kw_only=True)
    handle: str | None = field(default=None, kw_only=True)
    """The gateway's name for a call whose objectives may change."""
    gateway: str = field(default="", kw_only=True)
    """The id of the gateway that sent the call."""

    @property
    def queued_since_s(self) -> float:
        return self.arrived_s if self.received_s is None else self.received_s


@dataclass(frozen=True, slots=True)
class Output:
    """One generated token of a call. `finished` is True for the last one."""

    call: EmbeddedCall
    token: int
    finished: bool
