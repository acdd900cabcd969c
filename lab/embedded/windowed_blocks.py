"""The KV blocks of an embedded engine with two groups of layers: full attention, and attention in a sliding window.

Both groups take their blocks from one pool. A hit ends where both have what the next token needs. As vLLM does by
default, the window keeps that at two places of a prompt: at its last whole block, and at the *junction*, where full
attention had more of the prompt than the hit. All other blocks lose their content once the window has passed them.
Read in vLLM 0.32.0: `SlidingWindowManager`, `HybridKVCacheCoordinator`, `prefix_cache_retention_interval` 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.backends.adapter.hit_ends import EngineEnds, Kind
from plait.backends.protocol.cache_state import KvGroup
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.kv_blocks import KvBlocks
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS


class WindowedBlocks(KvBlocks):
    """`KvBlocks` with a window, whose block of some content is cached under `~hash`."""

    ends: EngineEnds[int]

    def __init__(self, kv_tokens: int, block_tokens: int, window_tokens: int, max_batch_tokens: int) -> None:
        super().__init__(kv_tokens, block_tokens)
        self._window_tokens, self._hit_blocks = window_tokens, max(1, self.blocks_for(window_tokens - 1))
        in_flight_tokens = 2 * max_batch_tokens  # of the iteration that is computed, and of the next one
        most = self._most_blocks = self.blocks_for(window_tokens - 1 + in_flight_tokens) + 1  # it may begin in a block
        self.groups = [KvGroup(block_tokens), KvGroup(block_tokens, most)]
        cache, total = self.cache, self.cache.total_blocks
        self.room_tokens = max(total - most, total // 2) * block_tokens
        self.ends = EngineEnds[int](
            (Kind((0,), block_tokens), Kind((1,), block_tokens, self._hit_blocks)),
            lambda block_hash: (block_hash in cache) + 2 * (~block_hash in cache),
            self.journal.changes,
            key_tokens=block_tokens,
            align_tokens=block_tokens,
        )

    def matched(self, call: EmbeddedCall) -> int:
        """How many blocks the hit of a waiting call has now."""
        most_tokens, chain, ends = super().matched(call) * self.block_tokens, call.chain.hashes, self.ends
        if ends.has_changed(chain, call.searched_at, call.hit_blocks * self.block_tokens):
            call.hit_blocks = ends.deepest(chain, most_tokens, most_tokens) // self.block_tokens
        call.searched_at = ends.changes
        return call.hit_blocks

    def window_needed(self, call: EmbeddedCall, new_tokens: int) -> int:
        """How many free blocks the window takes for a call's next tokens, as `EngineFacts.blocks_needed`."""
        if not call.blocks:
            hit = self._hit(call, self.matched(call))
            return min(self.blocks_for(new_tokens), self._most_blocks - len(hit)) + self.cache.unused(hit)
        more = self.blocks_for(call.computed_tokens + new_tokens) - len(call.blocks)
        return min(more, self._most_blocks - len(call.window_blocks))

    def end_of(self, call: EmbeddedCall, tokens: int) -> int:
        """The last place, up to `tokens`, where hits can end once a call is computed: as its own did, or a kept one."""
        ends = [call.hit_blocks if call.blocks else self.matched(call), *self._kept(call)]
        return max([end for end in ends if end * self.block_tokens <= tokens], default=0) * self.block_tokens

    def admit(self, call: EmbeddedCall) -> None:
        super().admit(call)
        call.window_blocks = self.cache.acquire(self._hit(call, call.hit_blocks))

    def extend(self, call: EmbeddedCall, tokens: int) -> None:
        more = self.blocks_for(call.computed_tokens + tokens) - len(call.blocks)
        call.window_blocks += self.cache.allocate(more)
        call.settled_tokens = call.computed_tokens
        super().extend(call, tokens)

    def register(self, call: EmbeddedCall) -> None:
        """Let other calls hit the call's full blocks, of the window only those that it keeps."""
        first, blocks, hashes = call.registered_blocks, call.window_blocks, call.chain.hashes
        before = len(call.blocks) - len(blocks)
        super().register(call)
        last = call.registered_blocks
        if first == last:
            return
        for end in self._kept(call):
            for index in range(max(first, end - self._hit_blocks), min(end, last)):
                blocks[index - before] = self.cache.register(blocks[index - before], ~hashes[index])
                self.ends.changed(hashes[index])
        start, stop = (at * self.block_tokens // TREE_BLOCK_TOKENS for at in (first, last))
        tree_blocks = call.tree_chain.hashes[start:stop]
        self.ends.computed(hashes, first * self.block_tokens, last * self.block_tokens, start, tree_blocks, call.prompt)

    def slide(self, running: Iterable[EmbeddedCall]) -> None:
        """Release what the windows have passed. A call's last iteration may be in flight, and reads what there was."""
        for call in running:
            before = len(call.blocks) - len(call.window_blocks)
            passed = (call.settled_tokens - self._window_tokens + 1) // self.block_tokens - before
            if passed > 0:
                self.cache.release(call.window_blocks[:passed])
                del call.window_blocks[:passed]

    def _hit(self, call: EmbeddedCall, blocks: int) -> list[int]:
        """The keys of the window's blocks in a hit of so many blocks."""
        return [~block_hash for block_hash in call.chain.hashes[max(0, blocks - self._hit_blocks) : blocks]]

    def _kept(self, call: EmbeddedCall) -> tuple[int, int]:
        """The places where a call keeps the window, as blocks: its junction, and its prompt's last whole block."""
        return call.matched_blocks, (call.prompt_tokens - 1) // self.block_tokens

    def _evicted(self, block_hash: int) -> None:
        if block_hash >= 0:
            super()._evicted(block_hash)
        self.ends.changed(block_hash if block_hash >= 0 else ~block_hash)
