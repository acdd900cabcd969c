"""A call in the embedded engine, and its output tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat

from plait.policy.prefix.block_hash import HashChain
from plait.policy.scheduling.plan import LocalCall


@dataclass(slots=True, eq=False)
class EmbeddedCall(LocalCall):
    """A call in this engine: the hashes of its KV blocks and tree blocks, and the source of its output.

    The call ends when it has generated `final_output_tokens`. The scheduler may only know its limit. `cached_tokens`
    are the tokens that the first admission found in the cache, as in vLLM's `usage`. `received_s` is when the engine
    received the call, which can be after its zero. `matched_blocks` is how many of its leading blocks were cached at
    the last look-up, and `loadable_blocks` behind them were in lower tiers, from which `loaded_tokens` were brought
    back. While the call waits, the blocks that are `kept` for it are not evicted. `handle` is the gateway's name for a
    call whose objectives may change, `gateway` that of the gateway.
    """

    chain: HashChain = field(kw_only=True)
    tree_chain: HashChain = field(kw_only=True)
    final_output_tokens: int = field(kw_only=True)
    output: Iterator[int] = field(default_factory=lambda: repeat(0), kw_only=True)
    blocks: list[int] = field(default_factory=list, kw_only=True)
    registered_blocks: int = field(default=0, kw_only=True)
    cached_tokens: int | None = field(default=None, kw_only=True)
    received_s: float | None = field(default=None, kw_only=True)
    matched_blocks: int = field(default=0, kw_only=True)
    loadable_blocks: int = field(default=0, kw_only=True)
    kept: list[int] = field(default_factory=list, kw_only=True)
    loaded_tokens: int = field(default=0, kw_only=True)
    handle: str | None = field(default=None, kw_only=True)
    gateway: str = field(default="", kw_only=True)

    @property
    def queued_since_s(self) -> float:
        return self.arrived_s if self.received_s is None else self.received_s


@dataclass(frozen=True, slots=True)
class Output:
    """One generated token of a call. `finished` is True for the last one."""

    call: EmbeddedCall
    token: int
    finished: bool
