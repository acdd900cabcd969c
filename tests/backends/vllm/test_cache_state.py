"""From events of a block pool to a journal of our chained hashes."""

from __future__ import annotations

from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.adapter.hit_ends import Kind
from plait.backends.protocol.cache_state import KvGroup, KvState
from plait.backends.vllm.cache_state import PoolObserver
from plait.lab.embedded.hash_chain import HashChain
from plait.policy.prefix.block_hash import root_hash
from tests.backends.vllm.fake_pool import Block, Pool, Request, image_at, request
from tests.examples import examples

TOKENS = list(range(1000, 1300))


def observed(blocks: int = 40, block_tokens: int = 16) -> tuple[Pool, PoolObserver]:
    pool = Pool(blocks, block_tokens)
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


@pytest.mark.parametrize(
    ("block_tokens", "tree_blocks"),
    [(16, 4), (32, 4), (48, 4), (64, 4), (80, 3), (128, 4), (176, 2), (528, 0)],
)
def test_blocks_are_named_by_our_own_chain(block_tokens: int, tree_blocks: int) -> None:
    pool, observer = observed(block_tokens=block_tokens)
    run(pool, block_tokens, TOKENS)
    assert stored(observer) == list(HashChain(64, root_hash("tiny"), TOKENS).hashes)[:tree_blocks]


class Recomputed:
    """A pool of blocks of some size, and what it has by looking at all of it."""

    def __init__(self, block_tokens: int, blocks: int) -> None:
        self.block_tokens = block_tokens
        self.pool = Pool(blocks, block_tokens)
        self.observer = PoolObserver(self.pool, group_id=0, block_tokens=block_tokens, model="tiny")
        self.prompts: list[Request] = []

    def send(self, prompt: Request, first_chunk: int) -> list[Block]:
        """A request hits what is there and computes the rest in two chunks, as far as there is room."""
        self.prompts.append(prompt)
        keys = [block_hash + bytes(4) for block_hash in prompt.block_hashes]
        cached = [self.pool.cached_block_hash_to_block.get_one_block(key) for key in keys]
        blocks = [block for block in takewhile(lambda block: block is not None, cached) if block is not None]
        hit = len(blocks)
        self.pool.touch(blocks)
        blocks += self.pool.take(min(len(keys) - hit, self.pool.get_num_free_blocks()))
        middle = min(hit + first_chunk, len(blocks))
        for first, end in ((hit, middle), (middle, len(blocks))):
            self.pool.cache_full_blocks(prompt, blocks, first, end, self.block_tokens, 0)
        return blocks

    def check(self) -> None:
        there, size, expected = self.pool.cached_block_hash_to_block.blocks, self.block_tokens, dict[int, int | None]()
        for prompt in self.prompts:
            hashes = HashChain(64, root_hash("tiny"), prompt.all_token_ids).hashes
            for index, tree_block in enumerate(hashes):
                overlapping = range(64 * index // size, -(-64 * (index + 1) // size))
                keys = [block_hash + bytes(4) for block_hash in prompt.block_hashes]
                if all(one < len(keys) and keys[one] in there for one in overlapping):
                    expected[tree_block] = hashes[index - 1] if index else None
        _, runs, _ = self.observer.journal.since(None)
        told = {one: parent for run in runs for parent, one in zip([run.parent, *run.hashes], run.hashes, strict=False)}
        assert told == expected


@settings(deadline=None, max_examples=examples(150))
@given(
    block_tokens=st.sampled_from((1, 4, 16, 32, 48, 64, 80, 112, 128, 176, 192, 528)),
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 700), st.integers(0, 90)), min_size=1, max_size=12),
    data=st.data(),
)
def test_reports_are_what_the_pool_has_with_blocks_of_any_size(
    block_tokens: int, lengths: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Prompts leave others within a block, end within a block, and lose blocks in any order."""
    engine, running = Recomputed(block_tokens, 1 + 1500 // block_tokens), list[list[Block]]()
    for number, (family, length, own) in enumerate(lengths):
        prompt = [family] * length + [100 + number] * own
        running.append(engine.send(request(prompt, block_tokens), data.draw(st.integers(0, 20))))
        engine.check()
        while len(running) > 2 or (running and data.draw(st.booleans())):
            engine.pool.free_blocks(reversed(running.pop(data.draw(st.integers(0, len(running) - 1)))))
        engine.check()


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


def test_the_block_with_an_image_is_left_out_with_all_of_its_tree_blocks() -> None:
    pool, observer = observed(block_tokens=128)
    run(pool, 128, TOKENS, mm_features=[image_at(250)])
    assert len(stored(observer)) == 2, "another prompt cannot hit the tokens before the image in the image's block"


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


def test_a_hit_ends_where_all_groups_have_what_it_needs() -> None:
    pool, observer = observed(blocks=60)
    observer.groups = [KvGroup(16), KvGroup(16, 2)]
    observer.follow_ends([Kind((0,), 16), Kind((1,), 16, 2)], 16, 0)
    assert observer.ends is not None
    full, keys = run(pool, 16, TOKENS), request(TOKENS, 16).block_hashes
    assert observer.ends.deepest(keys, 300) == 0
    windows = run(pool, 16, TOKENS, group=1)
    assert observer.ends.deepest(keys, 300) == 288
    assert observer.ends.deepest(keys, 287) == 272
    pool.free_blocks([*windows[14:15], *full[::-1], *windows[:14], *windows[15:]])
    pool.take(pool.get_num_free_blocks() - len(full) - len(windows) + 1)
    assert observer.ends.deepest(keys, 300) == 288
    assert observer.ends.deepest(keys, 270) == 224, "no window before token 240 or 256"
    assert pool.free
    pool.free_blocks([block for block in pool.blocks if block.ref_cnt])
    assert pool.reset_prefix_cache()
    assert observer.ends.deepest(keys, 300) == 0
    run(pool, 16, TOKENS)
    run(pool, 16, TOKENS, group=1)
    assert observer.ends.deepest(keys, 300) == 288
