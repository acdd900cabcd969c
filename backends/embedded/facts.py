"""The embedded engine's facts, which its local scheduler reads."""

from __future__ import annotations

from plait.backends.adapter.prefix_search import shared_blocks
from plait.backends.embedded.call import EmbeddedCall
from plait.backends.embedded.kv_blocks import KvBlocks
from plait.policy.scheduling.local_scheduler import LocalCall


class EmbeddedFacts:
    """The `EngineFacts` of one embedded engine. They read its `blocks`."""

    def __init__(self, blocks: KvBlocks, *, max_batch_tokens: int, max_running_calls: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        """The most new tokens one iteration may compute."""
        self.max_running_calls = max_running_calls
        """The most calls that may run at once."""
        self.shares_in_iteration = True
        """A block can be found once its computation is scheduled."""
        self._cache = blocks.cache
        self._matched = blocks.matched
        self._block_tokens = blocks.block_tokens

    @property
    def free_blocks(self) -> int:
        """KV blocks that no running call uses."""
        return self._cache.free_blocks

    def cached_tokens(self, call: LocalCall) -> int:
        """How many tokens of a waiting call are cached now. The last token is always computed."""
        assert isinstance(call, EmbeddedCall)
        return self._matched(call) * self._block_tokens

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        """How many free blocks `new_tokens` more of a call take, including cached blocks that no call uses yet."""
        assert isinstance(call, EmbeddedCall)
        if call.blocks:
            return -(-(call.computed_tokens + new_tokens) // self._block_tokens) - len(call.blocks)
        return -(-new_tokens // self._block_tokens) + self._cache.idle(call.chain.hashes, self._matched(call))

    def blocks_freed(self, call: LocalCall) -> int:
        """How many blocks preempting a running call would free."""
        assert isinstance(call, EmbeddedCall)
        return self._cache.exclusive(call.blocks)

    def stored_tokens(self, call: LocalCall) -> int:
        """How many tokens of a running call other calls can find in the cache."""
        return call.computed_tokens

    def block_key(self, call: LocalCall, tokens: int) -> int | None:
        """The hash of the block after the call's first `tokens`; None if it is no whole block."""
        assert isinstance(call, EmbeddedCall)
        hashes, index = call.chain.hashes, tokens // self._block_tokens
        return hashes[index] if index < len(hashes) else None

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        """How many tokens a waiting call could take from another call's blocks."""
        assert isinstance(call, EmbeddedCall)
        assert isinstance(other, EmbeddedCall)
        own, others = call.chain.hashes, other.chain.hashes
        most = min(len(others), (call.prompt_tokens + call.output_tokens - 1) // self._block_tokens)
        return shared_blocks(own, others, most) * self._block_tokens
