"""Blocks go to calls and come back, and what the local scheduler is told of it beforehand is what then happens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from plait.backends.protocol.cache_state import KvState, StoredRun
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import EmbeddedFacts
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.kv_blocks import KvBlocks
from plait.policy.prefix.block_hash import root_hash

ROOT = root_hash("m")


@pytest.fixture
def blocks() -> KvBlocks:
    return KvBlocks(kv_tokens=320, block_tokens=16)


@pytest.fixture
def facts(blocks: KvBlocks) -> EmbeddedFacts:
    return EmbeddedFacts(blocks, max_batch_tokens=512, max_running_calls=8)


def call_of(tokens: Sequence[int]) -> EmbeddedCall:
    chain, tree_chain = HashChain(16, ROOT, tokens), HashChain(64, ROOT, tokens)
    return EmbeddedCall("c", 0.0, len(tokens), chain=chain, tree_chain=tree_chain, final_output_tokens=9)


def test_what_a_call_needs_is_what_it_takes(blocks: KvBlocks, facts: EmbeddedFacts) -> None:
    first = call_of(range(100))
    for tokens in (40, 60):
        before, needed = facts.free_blocks, facts.blocks_needed(first, tokens)
        if not first.blocks:
            blocks.admit(first)
        blocks.extend(first, tokens)
        assert before - facts.free_blocks == needed
    assert blocks.state() == KvState(20, 13, 0)
    second = call_of([*range(100), 7, 8])
    assert facts.cached_tokens(second) == 96
    assert facts.blocks_needed(second, 6) == 1, "the others are in use already"
    blocks.admit(second)
    blocks.extend(second, 6)
    assert second.blocks[:6] == first.blocks[:6]
    assert (facts.blocks_freed(first), facts.blocks_freed(second)) == (1, 1)


def test_a_call_that_is_taken_back_finds_its_blocks_again(blocks: KvBlocks, facts: EmbeddedFacts) -> None:
    call = call_of(range(80))
    blocks.admit(call)
    blocks.extend(call, 80)
    assert facts.blocks_freed(call) == 5
    blocks.take_back(call)
    assert (call.blocks, call.computed_tokens, facts.free_blocks) == ([], 0, 20)
    assert facts.cached_tokens(call) == 64, "all but the block that its last token ends"
    assert facts.blocks_needed(call, 16) == 5, "idle ones are taken from the free ones too"
    blocks.admit(call)
    assert (len(call.blocks), call.computed_tokens) == (4, 64)


def test_a_tree_block_is_reported_while_its_last_block_is_there(blocks: KvBlocks) -> None:
    call = call_of(range(80))
    blocks.admit(call)
    blocks.extend(call, 60)
    assert blocks.journal.since(None)[1] == []
    blocks.extend(call, 20)
    assert blocks.journal.since(None)[1] == [StoredRun(None, [call.tree_chain.hashes[0]])]
    blocks.release(call)
    other = call_of(range(1000, 1290))
    blocks.admit(other)
    blocks.extend(other, 290)
    assert call.tree_chain.hashes[0] not in blocks.journal.stored
