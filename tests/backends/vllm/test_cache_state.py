"""From events of a block pool to a journal of our chained hashes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.backends.protocol.cache_state import KvState
from plait.backends.vllm.cache_state import PoolObserver
from plait.policy.prefix.block_hash import HashChain, root_hash
from tests.backends.vllm.fake_pool import Block, Pool, image_at, request

TOKENS = list(range(1000, 1300))


def observed(blocks: int = 40, block_tokens: int = 16) -> tuple[Pool, PoolObserver]:
    pool = Pool(blocks)
    return pool, PoolObserver(pool, group_id=0, block_tokens=block_tokens, model="tiny")


def run(pool: Pool, block_tokens: int, tokens: list[int], group: int = 0, **fields: Any) -> list[Block]:
    """A request computes all of its prompt; its blocks are still in use."""
    sent = request(tokens, block_tokens, **fields)
    blocks = pool.take(-(-len(tokens) // block_tokens))
    full = len(sent.block_hashes)
    for first, end in ((0, full // 2), (full // 2, full)):  # in two chunks
        pool.cache_full_blocks(
            request=sent,
            blocks=blocks,
            num_cached_blocks=first,
            num_full_blocks=end,
            block_size=block_tokens,
            kv_cache_group_id=group,
        )
    return blocks


def stored(observer: PoolObserver) -> list[int]:
    _, runs, _ = observer.journal.since(None)
    return [block for run in runs for block in run.hashes]


@pytest.mark.parametrize(("block_tokens", "granularity"), [(16, 64), (32, 64), (48, 96), (64, 64), (128, 128)])
def test_blocks_are_named_by_our_own_chain(block_tokens: int, granularity: int) -> None:
    pool, observer = observed(block_tokens=block_tokens)
    run(pool, block_tokens, TOKENS)
    assert observer.granularity_tokens == granularity
    assert stored(observer) == list(HashChain(granularity, root_hash("tiny"), TOKENS).hashes)


@pytest.mark.parametrize(
    ("fields", "root"),
    [
        ({"cache_salt": "tenant"}, root_hash("tiny", "tenant")),
        ({"lora_request": SimpleNamespace(lora_name="adapter")}, root_hash("adapter")),
    ],
)
def test_a_salt_and_a_lora_have_chains_of_their_own(fields: dict[str, Any], root: int) -> None:
    pool, observer = observed()
    run(pool, 16, TOKENS, **fields)
    assert stored(observer) == list(HashChain(64, root, TOKENS).hashes)


@pytest.mark.parametrize(
    ("fields", "blocks"), [({"prompt_embeds": object()}, 0), ({"mm_features": [image_at(200), image_at(130)]}, 2)]
)
def test_what_tokens_do_not_determine_is_left_out(fields: dict[str, Any], blocks: int) -> None:
    pool, observer = observed()
    run(pool, 16, TOKENS, **fields)
    assert len(stored(observer)) == blocks


def test_other_groups_are_not_looked_at() -> None:
    pool, observer = observed()
    run(pool, 16, TOKENS, group=1)
    assert stored(observer) == []


def test_evicted_blocks_take_their_tree_block_with_them() -> None:
    pool, observer = observed(blocks=20)
    blocks = run(pool, 16, TOKENS)
    pool.free_blocks(reversed(blocks))
    before = stored(observer)
    pool.take(3)  # one block that never was full, and the last two full ones
    assert stored(observer) == before[:-1] if len(TOKENS) % 64 < 32 else before
    pool.take(pool.get_num_free_blocks())
    assert stored(observer) == []


def test_kv_state_is_the_pools() -> None:
    pool, observer = observed(blocks=30)
    assert observer.kv_state() == KvState(30, 30, 0)
    blocks = run(pool, 16, TOKENS)  # 18 full blocks and one that is not
    assert observer.kv_state() == KvState(30, 11, 0)
    pool.free_blocks(reversed(blocks))
    assert observer.kv_state() == KvState(30, 12, 18)
    pool.touch(blocks[:4])
    assert observer.kv_state() == KvState(30, 12, 14)
    pool.free_blocks(blocks[:4])
    pool.take(15)
    assert observer.kv_state().cached_blocks == sum(b.block_hash is not None for b in pool.free)


def test_a_reset_is_followed_into_the_new_map() -> None:
    pool, observer = observed()
    blocks = run(pool, 16, TOKENS)
    assert not pool.reset_prefix_cache(), "blocks are in use"
    assert stored(observer)
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert stored(observer) == []
    assert observer.kv_state() == KvState(40, 40, 0)
    run(pool, 16, TOKENS)
    assert len(stored(observer)) == 4


def test_what_comes_behind_a_cached_prefix_continues_its_chain() -> None:
    pool, observer = observed(block_tokens=32)
    blocks = run(pool, 32, TOKENS)
    other = [*TOKENS[:192], *range(64)]
    pool.touch(blocks[:6])
    pool.cache_full_blocks(request(other, 32), [*blocks[:6], *pool.take(2)], 6, 8, 32, 0)
    expected = list(HashChain(64, root_hash("tiny"), other).hashes)
    _, runs, _ = observer.journal.since(4)
    assert [(run.parent, run.hashes) for run in runs] == [(expected[2], [expected[3]])]


def test_also_when_the_prefix_itself_was_never_named() -> None:
    pool, observer = observed(block_tokens=32)
    blocks = run(pool, 32, TOKENS)
    observer.blocks.clear()
    pool.cache_full_blocks(request(TOKENS, 32), [*blocks[:6], *pool.take(2)], 6, 8, 32, 0)
    assert stored(observer) == [HashChain(64, root_hash("tiny"), TOKENS).hashes[3]]
