"""The facts of SGLang by which calls share prefixes: in whole tree blocks, found once SGLang has stored them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from plait.backends.sglang.cache_state import CacheObserver
from plait.backends.sglang.calls import SglangCall, SglangFacts, find_hit
from plait.policy.prefix.block_hash import chain

TREE_BLOCK = 64


def facts_of(observer: CacheObserver, *, disable: bool = False) -> SglangFacts:
    scheduler = SimpleNamespace(
        max_prefill_tokens=4096,
        chunked_prefill_size=2048,
        max_running_requests=8,
        page_size=observer.page_tokens,
        tree_cache=SimpleNamespace(disable=disable),
    )
    return SglangFacts(scheduler, observer)


def call_of(observer: CacheObserver, tokens: list[int]) -> SglangCall:
    blocks = chain(tokens[:-1], TREE_BLOCK, observer.root(None))
    return SglangCall("call", 0.0, len(tokens), order=(0.0, 0), received_s=0.0, tree_blocks=blocks)


def test_blocks_that_calls_can_share_have_one_key() -> None:
    observer = CacheObserver(page_tokens=1, model="m")
    facts = facts_of(observer)
    call, other = call_of(observer, list(range(300))), call_of(observer, [*range(150), *range(500, 650)])
    assert facts.block_key(call, 64) == facts.block_key(other, 127)
    assert facts.block_key(call, 128) != facts.block_key(other, 128)
    assert facts.block_key(call, 256) is None, "its last block is not whole"
    assert facts.shared_tokens(call, other) == 128
    assert not facts.shares_in_iteration


def test_a_running_call_has_stored_what_the_cache_reports() -> None:
    observer = CacheObserver(page_tokens=1, model="m")
    facts, call = facts_of(observer), call_of(observer, list(range(300)))
    call.computed_tokens = 200
    assert facts.stored_tokens(call) == 0
    for parent, block in zip((None, *call.tree_blocks), call.tree_blocks[:2], strict=False):
        observer.journal.store(block, parent)
    assert facts.stored_tokens(call) == 128


def test_without_a_prefix_cache_no_call_follows_another() -> None:
    observer = CacheObserver(page_tokens=1, model="m")
    assert facts_of(observer, disable=True).block_key(call_of(observer, list(range(300))), 0) is None


@pytest.mark.parametrize(("page_tokens", "shared_tokens"), [(1, 128), (48, 96), (64, 128), (128, 128), (528, 0)])
def test_calls_share_whole_pages(page_tokens: int, shared_tokens: int) -> None:
    observer = CacheObserver(page_tokens=page_tokens, model="m")
    facts, call, other = (
        facts_of(observer),
        call_of(observer, [*range(700)]),
        call_of(observer, [*range(150), *range(500)]),
    )
    assert facts.shared_tokens(call, other) == shared_tokens
    for parent, block in zip((None, *call.tree_blocks), call.tree_blocks[:3], strict=False):
        observer.journal.store(block, parent)
    assert find_hit(call, observer.journal.stored, page_tokens) == 192 // page_tokens * page_tokens
    assert call.hit_blocks == 3
    key = facts.block_key(call, call.hit_tokens)
    assert key not in observer.journal.stored
    assert key in call.tree_blocks


@pytest.mark.parametrize(("page_tokens", "first", "second"), [(16, 0, 1), (128, 1, 3), (528, 7, None)])
def test_a_page_is_known_by_its_last_tree_block(page_tokens: int, first: int, second: int | None) -> None:
    observer = CacheObserver(page_tokens=page_tokens, model="m")
    facts, call = facts_of(observer), call_of(observer, [*range(700)])
    assert facts.block_key(call, 0) == call.tree_blocks[first]
    assert facts.block_key(call, max(64, page_tokens)) == (None if second is None else call.tree_blocks[second])
