"""The facts of SGLang by which calls share prefixes: in whole tree blocks, found once SGLang has stored them."""

from __future__ import annotations

from types import SimpleNamespace

from plait.backends.sglang.cache_state import CacheObserver
from plait.backends.sglang.calls import SglangCall, SglangFacts
from plait.policy.prefix.block_hash import chain

TREE_BLOCK = 64


def facts_of(observer: CacheObserver, *, disable: bool = False) -> SglangFacts:
    scheduler = SimpleNamespace(
        max_prefill_tokens=4096,
        chunked_prefill_size=2048,
        max_running_requests=8,
        page_size=1,
        tree_cache=SimpleNamespace(disable=disable),
    )
    return SglangFacts(scheduler, observer)


def call_of(observer: CacheObserver, tokens: list[int]) -> SglangCall:
    blocks = chain(tokens[:-1], observer.granularity_tokens, observer.root(None))
    return SglangCall("call", 0.0, len(tokens), order=(0.0, 0), received_s=0.0, tree_blocks=blocks)


def test_blocks_that_calls_can_share_have_one_key() -> None:
    observer = CacheObserver(page_tokens=1, model="m")
    assert observer.granularity_tokens == TREE_BLOCK
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
