"""The exact content of vLLM's block pool as tree blocks, observed where blocks enter and leave the prefix-cache map.

vLLM names a block by its own hash, chained over the tokens, LoRA, cache salt and media up to the block's end. When vLLM
caches a request's blocks, the request's tokens are known, so the hash of the tree block
(`plait.policy.prefix.block_hash`) can be computed from the same tokens, LoRA and salt. When vLLM evicts a block, the
block's own hash tells which tree block has lost a part.

For a model with several kinds of attention, the blocks of the first full-attention group are reported, and where a hit
can end (`EngineEnds`). Blocks whose KV depends on more than tokens (behind an image, prompt embeddings) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.hit_ends import EngineEnds, Kind
from plait.backends.adapter.tree_block_tiers import TreeBlockTiers
from plait.backends.protocol.cache_state import KvGroup, KvState
from plait.backends.vllm.tiered_blocks import TieredBlocks
from plait.backends.vllm.tree_blocks import TreeBlocks
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, chain, root_hash

_root_hash = lru_cache(maxsize=4096)(root_hash)


class PoolObserver:
    """Follows one BlockPool from its start, by wrapping its methods.

    `journal` has the tree blocks on the accelerator. If vLLM offloads chunks of `chunk_blocks` blocks to host memory,
    the caller reports chunks to `tiered`.
    """

    def __init__(self, pool: Any, *, group_id: int, block_tokens: int, model: str, chunk_blocks: int = 0) -> None:
        self.journal = CacheJournal()
        self.tiered = TieredBlocks(self.journal, chunk_blocks) if chunk_blocks else None
        self.blocks = self.tiered or TreeBlocks(TreeBlockTiers(self.journal))
        self.block_tokens = block_tokens
        self.group_suffix = suffix(group_id)
        self.groups: list[KvGroup] = []
        """The groups that share the pool, for the reports (see `KvState`)."""
        self.ends: EngineEnds[bytes] | None = None
        """Where hits can end, if not after each block."""
        self.untold = ""
        """See `CacheState`."""
        self._pool = pool
        self._group_id = group_id
        self._model = model
        self._groups_with: dict[bytes, int] = {}  # for `ends`, by a block's hash
        self._idle: set[int] = set()  # ids of cached blocks that no request uses
        self._follow_map()
        wrap(pool, "cache_full_blocks", self._cache_full_blocks)
        wrap(pool, "touch", self._touch)
        wrap(pool, "free_blocks", self._free_blocks)
        wrap(pool, "reset_prefix_cache", self._reset_prefix_cache)

    def follow_ends(self, kinds: Sequence[Kind], align_tokens: int, interval_tokens: int) -> None:
        """Follow what all `kinds` of groups keep (see `EngineEnds`)."""
        sizes = {"key_tokens": self._pool.hash_block_size, "align_tokens": align_tokens}
        have, changes = self._groups_with, self.journal.changes
        self.ends = EngineEnds(kinds, lambda key: have.get(key, 0), changes, **sizes, interval_tokens=interval_tokens)
        self._note_changes(self.ends)

    def kv_state(self) -> KvState:
        """The pool's current counts of blocks. vLLM keeps one block for itself."""
        cached = len(self._idle)
        return KvState(self._pool.num_gpu_blocks - 1, self._pool.get_num_free_blocks() - cached, cached, self.groups)

    def prompt_blocks(self, request: Any) -> Sequence[int]:
        """The hashes of a prompt's tree blocks, up to the first token whose KV depends on more than tokens."""
        end = min(request.num_prompt_tokens, _hashable_tokens(request))
        return chain(request.all_token_ids[:end], TREE_BLOCK_TOKENS, self._root(request))

    def key(self, block_hash: bytes) -> bytes:
        """The pool's key for the block with this hash in the observed group."""
        return block_hash + self.group_suffix

    def _follow_map(self) -> None:
        """Wrap the map's `insert` and `pop`. The wrappers are short because a step may call them hundreds of times."""
        blocks, suffix, idle = self._pool.cached_block_hash_to_block, self.group_suffix, self._idle
        inserted, removed = self.blocks.inserted, self.blocks.removed
        vllm_insert, vllm_pop = blocks.insert, blocks.pop

        def insert(key: bytes, block: Any) -> None:
            vllm_insert(key, block)
            if key.endswith(suffix):
                inserted(key)

        def pop(key: bytes, block_id: int) -> Any:
            block = vllm_pop(key, block_id)
            if block is not None:
                idle.discard(block_id)
                if key.endswith(suffix):
                    removed(key)
            return block

        blocks.insert, blocks.pop = insert, pop

    def _note_changes(self, ends: EngineEnds[bytes]) -> None:
        """Wrap the map's `insert` and `pop` once more, for the blocks of all groups."""
        blocks, changed, have = self._pool.cached_block_hash_to_block, ends.changed, self._groups_with
        inner_insert, inner_pop, get = blocks.insert, blocks.pop, blocks.get_one_block
        bits = {suffix(group): 1 << group for group in range(len(self.groups))}

        def insert(key: bytes, block: Any) -> None:
            inner_insert(key, block)
            block_hash, bit = key[:-4], bits[key[-4:]]
            before = have.get(block_hash, 0)
            if not before & bit:
                have[block_hash] = before | bit
                changed(block_hash)

        def pop(key: bytes, block_id: int) -> Any:
            block = inner_pop(key, block_id)
            if block is not None and get(key) is None:
                block_hash = key[:-4]
                have[block_hash] ^= bits[key[-4:]]
                changed(block_hash)
                if not have[block_hash]:
                    del have[block_hash]
            return block

        blocks.insert, blocks.pop = insert, pop

    def _cache_full_blocks(  # noqa: PLR0917 - vLLM's own parameters
        self,
        cache: Callable[..., None],
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        **others: Any,
    ) -> None:
        cache(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, **others)
        if kv_cache_group_id == self._group_id:
            if self.tiered is not None:
                self.tiered.chunked(blocks, num_cached_blocks, num_full_blocks)
            start, hashes = self._compose(request, blocks, num_cached_blocks, num_full_blocks)
            if self.ends is not None:
                first, end = num_cached_blocks * block_size, num_full_blocks * block_size
                tokens = request.all_token_ids
                if request.mm_features or request.prompt_embeds is not None:
                    tokens = tokens[: _hashable_tokens(request)]
                self.ends.computed(request.block_hashes, first, end, start, hashes, tokens)

    def _compose(self, request: Any, blocks: list[Any], first: int, end: int) -> tuple[int, Sequence[int]]:
        """Name the tree blocks whose last engine block is one of `blocks[first:end]`. Returns (first index, names).

        Engine blocks that no tokens determine are left out, with what they have of other tree blocks.
        """
        tokens, size = self.block_tokens, TREE_BLOCK_TOKENS
        end = min(end, _hashable_tokens(request) // tokens)
        start, stop = first * tokens // size, end * tokens // size
        if start >= stop:
            return start, ()
        before = self._hash_before(request, blocks, start)
        parent = before if start else None
        hashes = chain(request.all_token_ids[start * size : stop * size], size, before)
        for index, tree_block in enumerate(hashes, start):
            keys = [block.block_hash for block in blocks[index * size // tokens : -(-(index + 1) * size // tokens)]]
            if None not in keys:
                self.blocks.composed(tree_block, parent, keys)
            parent = tree_block
        return start, hashes

    def _hash_before(self, request: Any, blocks: list[Any], index: int) -> int:
        """The chain's hash before a request's tree block `index`; recomputed only if the block before is not known."""
        start = index * TREE_BLOCK_TOKENS
        last = blocks[-(-start // self.block_tokens) - 1].block_hash if index else None
        known = self.blocks.tree_block(last) if last is not None else None
        if known is not None:
            return known
        root = self._root(request)
        return chain(request.all_token_ids[:start], TREE_BLOCK_TOKENS, root)[-1] if index else root

    def _root(self, request: Any) -> int:
        """The hash before a request's first block."""
        lora = request.lora_request
        return _root_hash(lora.lora_name if lora is not None else self._model, request.cache_salt or "")

    def _touch(self, touch: Callable[..., None], blocks: Iterable[Any]) -> None:
        touch(blocks)
        self._idle.difference_update([block.block_id for block in blocks])

    def _free_blocks(self, free: Callable[..., None], ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        free(blocks)
        self._idle.update([b.block_id for b in blocks if b.ref_cnt == 0 and b.block_hash is not None])

    def _reset_prefix_cache(self, reset: Callable[..., bool]) -> bool:
        done = reset()
        if done:
            self._idle.clear()
            self.blocks.clear()
            self._follow_map()  # vLLM has made a new map
            if self.ends is not None:
                self.ends.clear()
                self._groups_with.clear()
                self._note_changes(self.ends)
        return done


def suffix(group: int) -> bytes:
    """What vLLM appends to a block's hash to name the block within a KV cache group."""
    return group.to_bytes(4, "big")


def wrap(target: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of one object by `around(original, ...)`."""
    original = getattr(target, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(target, name, wrapper)


def _hashable_tokens(request: Any) -> int:
    """How many of a request's leading tokens determine their KV completely."""
    if request.prompt_embeds is not None:
        return 0
    media = [int(feature.mm_position.offset) for feature in request.mm_features]
    return min(media, default=int(request.num_tokens))
