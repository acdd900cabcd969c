"""The embedded engine's KV blocks: their cache, and the tree blocks that they form in its reports.

`KvBlocks` follows a call: `load` and `loaded` (from lower tiers) while it waits, `admit`, `extend` in each iteration,
then `release` or, when it is preempted, `take_back`. Other calls can hit a block once its computation is scheduled, as
in vLLM, because only a later iteration reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.hit_ends import EngineEnds
from plait.backends.adapter.tree_block_tiers import TreeBlockTiers
from plait.backends.protocol.cache_state import KvGroup, KvState
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.lower_tiers import LowerTiers, TierSettings
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS


class BlockCache:
    """A KV cache of `total_blocks` reference-counted blocks, found by chained hash, evicted in LRU order.

    Calls release their last block first, so eviction takes a prefix from its end (leaf first), as in vLLM. Each hash
    has one block: a call that computes the same content again switches to the existing block. `on_evict` gets the hash
    of each evicted block.
    """

    def __init__(self, total_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.total_blocks = total_blocks
        self.cached_blocks = 0
        """Blocks that have a prefix and that no call uses."""
        self._on_evict = on_evict
        self._references = [0] * total_blocks
        self._hashes: list[int | None] = [None] * total_blocks
        self._by_hash: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total_blocks))

    @property
    def free_blocks(self) -> int:
        """Blocks that no call uses, including cached ones. All of them can be allocated."""
        return len(self._free)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._by_hash

    def match(self, hashes: Sequence[int], most: int | None = None, guess: int = 0) -> int:
        """How many of a chain's leading blocks are cached, at most `most`.

        Eviction takes leaves first, so a bisection finds the number. Two look-ups confirm a `guess` that is right.
        """
        by_hash = self._by_hash
        low, high = 0, len(hashes)
        if most is not None and most < high:
            high = most
        if guess <= high and (not guess or hashes[guess - 1] in by_hash):
            if guess == high or hashes[guess] not in by_hash:
                return guess
            low = guess + 1
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in by_hash:
                low = middle + 1
            else:
                high = middle
        return low

    def idle(self, hashes: Sequence[int], most: int) -> int:
        """How many of a chain's first `most` blocks, all of them cached, no call uses: the free blocks that they take.

        A call that uses a block uses all blocks before it. So a bisection finds the first block that no call uses.
        """
        references, by_hash = self._references, self._by_hash
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2
            if references[by_hash[hashes[middle]]]:
                low = middle + 1
            else:
                high = middle
        return most - low

    def unused(self, hashes: Sequence[int]) -> int:
        """How many of these blocks, all of them cached, no call uses."""
        return sum([not self._references[self._by_hash[block_hash]] for block_hash in hashes])

    def exclusive(self, blocks: Sequence[int]) -> int:
        """How many of a call's blocks no other call uses."""
        return sum(self._references[block] == 1 for block in blocks)

    def acquire(self, hashes: Sequence[int]) -> list[int]:
        blocks = [self._by_hash[block_hash] for block_hash in hashes]
        for block in blocks:
            self._use(block)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Use `count` blocks without content. Evicts in LRU order. The caller has checked `free_blocks`."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            evicted = self._hashes[block]
            if evicted is not None:
                self._hashes[block] = None
                del self._by_hash[evicted]
                self.cached_blocks -= 1
                self._on_evict(evicted)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, block_hash: int) -> int:
        """`block` now has this prefix. Returns the block to use from now on: an older one with this prefix, if any."""
        existing = self._by_hash.get(block_hash)
        if existing is None:
            self._hashes[block] = block_hash
            self._by_hash[block_hash] = block
            return block
        if existing != block:
            self._use(existing)
            self.release([block])
        return existing

    def release(self, blocks: Sequence[int]) -> None:
        """A call no longer uses these blocks, given in prompt order."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)  # without content, so allocated before any eviction
                else:
                    self.cached_blocks += 1

    def _use(self, block: int) -> None:
        if self._references[block] == 0:
            del self._free[block]
            self.cached_blocks -= 1
        self._references[block] += 1


class Load(NamedTuple):
    """A call's wait for blocks from lower tiers, over at `ends_s`.

    `blocks` receive the call's chain from position `first` on. Without `blocks`, the call waits for another's load.
    """

    ends_s: float
    first: int
    blocks: Sequence[int]


@dataclass(slots=True)
class _Named:
    """Consecutive tree blocks that end with one KV block, the tree block before them, and the tier they are in."""

    tree_blocks: Sequence[int]
    parent: int | None
    tier: int | None = None


class KvBlocks:
    """A KV cache of `kv_tokens` and the tiers below. Only this class changes the blocks of a call."""

    def __init__(self, kv_tokens: int, block_tokens: int, lower: Sequence[TierSettings] = ()) -> None:
        self.block_tokens = block_tokens
        self.journal = CacheJournal()
        self.cache = BlockCache(kv_tokens // block_tokens, self._evicted)
        self.ends: EngineEnds[int] | None = None
        self.groups: list[KvGroup] = []
        self.room_tokens = self.cache.total_blocks * block_tokens
        """The tokens of the longest call that fits."""
        self.lower = LowerTiers(lower, block_tokens, self.journal, self.cache.__contains__, self._place)
        self._tiers = TreeBlockTiers(self.journal, *(told.journal for told in self.lower.told))
        self._named: dict[int, _Named] = {}  # by the hash of the last KV block of these tree blocks
        self._on_the_way: dict[int, float] = {}
        """When each block arrives that is being loaded, by hash."""

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def matched(self, call: EmbeddedCall) -> int:
        """How many leading blocks of a waiting call are cached now. The engine always computes the last token."""
        most = (call.prompt_tokens + call.output_tokens - 1) // self.block_tokens
        call.matched_blocks = self.cache.match(call.chain.hashes, most, call.matched_blocks)
        return call.matched_blocks

    def loadable(self, call: EmbeddedCall) -> int:
        """How many blocks after the `matched` ones lower tiers have."""
        if not self.lower:
            return 0
        most = (call.prompt_tokens + call.output_tokens - 1) // self.block_tokens
        call.loadable_blocks = self.lower.held(call.chain.hashes, self.matched(call), most, call.loadable_blocks)
        return call.loadable_blocks

    def load(self, call: EmbeddedCall, now_s: float, added_s: Callable[[int, int], tuple[float, float]]) -> Load | None:
        """Begin to load a waiting call's blocks. These and the call's cached blocks cannot be evicted from now on.

        None if there is nothing to load, no room, or if computing (`added_s`) takes less time than loading.
        """
        matched, loadable = self.matched(call), self.loadable(call)
        if not loadable:
            return None
        cache, hashes = self.cache, call.chain.hashes
        missing = hashes[matched : matched + loadable]
        arrives_s = self._on_the_way.get(missing[0])
        if arrives_s is not None:
            return Load(arrives_s, matched, ())
        if cache.idle(hashes, matched) + loadable > cache.free_blocks:
            return None
        if self.lower.load_s(missing, now_s) > added_s(loadable * self.block_tokens, matched * self.block_tokens)[0]:
            return None
        self.let_go(call)
        call.kept = cache.acquire(hashes[:matched])
        ends_s = self.lower.load(missing, now_s)
        self._on_the_way.update(dict.fromkeys(missing, ends_s))
        return Load(ends_s, matched, cache.allocate(loadable))

    def loaded(self, call: EmbeddedCall, load: Load) -> None:
        """A load has ended. The call keeps the blocks until it is admitted."""
        for index, block in enumerate(load.blocks, load.first):
            block_hash = call.chain.hashes[index]
            del self._on_the_way[block_hash]
            call.kept.append(self.cache.register(block, block_hash))
            self._stored(call, index)

    def give_up(self, call: EmbeddedCall, load: Load) -> None:
        """A call ends during its load. The link stays busy until the load would have ended."""
        for index in range(load.first, load.first + len(load.blocks)):
            del self._on_the_way[call.chain.hashes[index]]
        self.cache.release(load.blocks)
        self.let_go(call)

    def let_go(self, call: EmbeddedCall) -> None:
        """Make the blocks kept for a waiting call evictable again."""
        self.cache.release(call.kept)
        call.kept = []

    def admit(self, call: EmbeddedCall) -> None:
        """Start the call on its cached blocks, whose tokens count as computed."""
        matched = self.matched(call)
        call.blocks = self.cache.acquire(call.chain.hashes[:matched])
        if call.kept:
            self.let_go(call)
        call.registered_blocks = matched
        call.computed_tokens = matched * self.block_tokens

    def extend(self, call: EmbeddedCall, tokens: int) -> None:
        """Give the call the blocks for `tokens` more. Other calls can hit those that are full then."""
        call.computed_tokens += tokens
        more = -(-call.computed_tokens // self.block_tokens) - len(call.blocks)
        if more > 0:  # most decodes need none
            call.blocks += self.cache.allocate(more)
        if call.computed_tokens // self.block_tokens > call.registered_blocks:
            self.register(call)

    def register(self, call: EmbeddedCall) -> None:
        """Let other calls hit the call's full blocks, except one with a token that is still being computed."""
        whole, hashes, blocks = call.computed_tokens // self.block_tokens, call.chain.hashes, call.blocks
        if whole > call.registered_blocks:
            whole = min(whole, len(hashes))
            for index in range(call.registered_blocks, whole):
                blocks[index] = self.cache.register(blocks[index], hashes[index])
                self._stored(call, index)
            call.registered_blocks = whole

    def release(self, call: EmbeddedCall) -> None:
        """The call has ended. Its blocks stay cached until they are evicted, those of a window the longest."""
        self.cache.release(call.window_blocks + call.blocks)

    def take_back(self, call: EmbeddedCall) -> None:
        """Release the blocks of a preempted call, which will start anew."""
        self.cache.release(call.window_blocks + call.blocks)
        call.blocks, call.window_blocks, call.searched_at = [], [], -1
        call.computed_tokens = 0

    def state(self) -> KvState:
        cache = self.cache
        free_blocks = cache.free_blocks - cache.cached_blocks
        return KvState(cache.total_blocks, free_blocks, cache.cached_blocks, self.groups)

    def _stored(self, call: EmbeddedCall, index: int) -> None:
        """Report tree blocks while their last KV block is cached. Eviction takes that block first."""
        start, end = (at * self.block_tokens // TREE_BLOCK_TOKENS for at in (index, index + 1))
        if start < end:
            tree, block_hash = call.tree_chain, call.chain.hashes[index]
            if block_hash not in self._named:
                self._named[block_hash] = _Named(tree.hashes[start:end], tree.parent(start))
            self._place(block_hash)

    def _evicted(self, block_hash: int) -> None:
        self.lower.sink(block_hash)

    def _place(self, block_hash: int) -> None:
        """Report the tree blocks that end with a KV block in the fastest tier that has it."""
        named = self._named.get(block_hash)
        if named is None:
            return
        tier = 0 if block_hash in self.cache else self.lower.fastest(block_hash)
        self._tiers.move(named.tree_blocks, named.parent, named.tier, tier)
        named.tier = tier
        if tier is None:
            del self._named[block_hash]
