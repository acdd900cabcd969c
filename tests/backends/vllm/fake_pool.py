"""vLLM's block pool in so far as it is observed: a map of copies, and blocks that are used, freed and evicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    is_null: bool = False


class BlockMap:
    def __init__(self) -> None:
        self.blocks: dict[bytes, dict[int, Block]] = {}

    def insert(self, key: bytes, block: Block) -> None:
        self.blocks.setdefault(key, {})[block.block_id] = block

    def pop(self, key: bytes, block_id: int) -> Block | None:
        copies = self.blocks.get(key, {})
        block = copies.pop(block_id, None)
        if not copies:
            self.blocks.pop(key, None)
        return block

    def get_one_block(self, key: bytes) -> Block | None:
        return next(iter(self.blocks.get(key, {}).values()), None)


class Pool:
    def __init__(self, blocks: int, block_tokens: int = 16) -> None:
        self.hash_block_size = block_tokens
        self.num_gpu_blocks = blocks + 1  # vLLM keeps one for itself
        self.blocks = [Block(number) for number in range(blocks)]
        self.free = deque(self.blocks)
        self.cached_block_hash_to_block = BlockMap()

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def take(self, count: int) -> list[Block]:
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            if block.block_hash is not None:
                self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
                block.block_hash = None
            block.ref_cnt = 1
        return taken

    def cache_full_blocks(  # noqa: PLR0917 - vLLM's own parameters
        self,
        request: Any,
        blocks: Sequence[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        assert block_size * num_full_blocks <= request.num_tokens
        for index in range(num_cached_blocks, num_full_blocks):
            key = blocks[index].block_hash = request.block_hashes[index] + kv_cache_group_id.to_bytes(4, "big")
            self.cached_block_hash_to_block.insert(key, blocks[index])

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free.append(block)

    def reset_prefix_cache(self) -> bool:
        if len(self.free) < len(self.blocks):
            return False
        self.cached_block_hash_to_block = BlockMap()
        for block in self.blocks:
            block.block_hash = None
        return True


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    block_hashes: list[bytes]
    cache_salt: str | None = None
    lora_request: Any = None
    prompt_embeds: Any = None
    mm_features: list[Any] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def request(tokens: Sequence[int], block_tokens: int, **fields: Any) -> Request:
    """A request whose engine keys are its tokens, written out."""
    ends = range(block_tokens, len(tokens) + 1, block_tokens)
    salt = f"{fields.get('cache_salt')}|{fields.get('lora_request')}|"
    hashes = [f"{salt}{','.join(map(str, tokens[:end]))}".encode() for end in ends]
    return Request("request", list(tokens), hashes, **fields)


def image_at(offset: int) -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset))
