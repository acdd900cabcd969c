"""The KV blocks of the calls in one embedded engine, and the tree blocks that they form in its reports.

A block can be found once its computation is scheduled, as in vLLM, because only a later iteration reads it.
"""

from __future__ import annotations

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.embedded.block_cache import BlockCache
from plait.backends.embedded.call import EmbeddedCall
from plait.backends.protocol.cache_state import KvState
from plait.policy.prefix.block_hash import tree_block_tokens


class KvBlocks:
    """A KV cache of `kv_tokens`. Only this class changes a call's blocks. `journal` has the tree blocks in `cache`."""

    def __init__(self, kv_tokens: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.granularity_tokens = tree_block_tokens(block_tokens)
        self.journal = CacheJournal()
        self.cache = BlockCache(kv_tokens // block_tokens, self._evicted)
        self._tree_block_of: dict[int, int] = {}

    def blocks_for(self, tokens: int) -> int:
        """How many blocks `tokens` take."""
        return -(-tokens // self.block_tokens)

    def matched(self, call: EmbeddedCall) -> int:
        """How many leading blocks of a waiting call are cached now. The last token is always computed."""
        most = (call.prompt_tokens + call.output_tokens - 1) // self.block_tokens
        call.matched_blocks = self.cache.match(call.chain.hashes, most, call.matched_blocks)
        return call.matched_blocks

    def admit(self, call: EmbeddedCall) -> None:
        """Give the call its cached blocks, and count their tokens as computed."""
        matched = self.matched(call)
        call.blocks = self.cache.acquire(call.chain.hashes[:matched])
        call.registered_blocks = matched
        call.computed_tokens = matched * self.block_tokens

    def extend(self, call: EmbeddedCall, tokens: int) -> None:
        """Give the call the blocks for `tokens` more. Blocks that are full now can be found from now on."""
        cache, blocks = self.cache, call.blocks
        call.computed_tokens += tokens
        whole, rest_tokens = divmod(call.computed_tokens, self.block_tokens)
        more = whole + (rest_tokens > 0) - len(blocks)
        if more > 0:  # most decodes need none
            blocks += cache.allocate(more)
        if whole > call.registered_blocks:
            for index in range(call.registered_blocks, whole):
                blocks[index] = cache.register(blocks[index], call.chain.hashes[index])
                self._stored(call, index)
            call.registered_blocks = whole

    def release(self, call: EmbeddedCall) -> None:
        """The call has ended. Its blocks stay cached until they are evicted."""
        self.cache.release(call.blocks)

    def take_back(self, call: EmbeddedCall) -> None:
        """Release the blocks of a preempted call, which will start anew."""
        self.cache.release(call.blocks)
        call.blocks = []
        call.computed_tokens = 0

    def state(self) -> KvState:
        """The current counts of blocks."""
        cache = self.cache
        return KvState(cache.total_blocks, cache.free_blocks - cache.cached_blocks, cache.cached_blocks)

    def _stored(self, call: EmbeddedCall, index: int) -> None:
        """Report a tree block while its last KV block is cached. Eviction takes that block first."""
        per_tree_block = self.granularity_tokens // self.block_tokens
        tree_index, offset = divmod(index, per_tree_block)
        if offset == per_tree_block - 1:
            tree_block = self._tree_block_of[call.chain.hashes[index]] = call.tree_chain.hashes[tree_index]
            self.journal.store(tree_block, call.tree_chain.parent(tree_index))

    def _evicted(self, block_hash: int) -> None:
        tree_block = self._tree_block_of.pop(block_hash, None)
        if tree_block is not None:
            self.journal.remove(tree_block)
