"""The hits that are kept for waiting calls are those that a search of the cache finds."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.sglang.cache_state import CacheObserver
from plait.backends.sglang.calls import SglangCall, WaitingHits

BLOCKS = 4
CHAINS = [[10 * family + number for number in range(BLOCKS)] for family in range(3)]
EVENTS = st.one_of(
    st.tuples(st.just("queued"), st.integers(0, 2), st.integers(0, BLOCKS)),
    st.tuples(st.just("left"), st.integers(0, 9), st.none()),
    st.tuples(st.just("keep"), st.integers(0, 2), st.integers(0, BLOCKS)),
    st.tuples(st.just("follow"), st.none(), st.none()),
)


@given(st.lists(EVENTS, max_size=40), st.sampled_from((0, 2, 1000)))
def test_after_each_step_they_are_what_the_cache_has(events: list[tuple[str, Any, Any]], tombstones: int) -> None:
    observer = CacheObserver(page_tokens=64, model="m")
    journal = observer.journal = CacheJournal(tombstones)
    hits, waiting, gone = WaitingHits(observer), list[SglangCall](), list[tuple[SglangCall, int]]()
    for kind, which, number in [*events, ("follow", None, None)]:
        if kind == "queued":
            waiting.append(_call(CHAINS[which][:number], expected_blocks=which))
            hits.queued(waiting[-1])
        elif kind == "left" and waiting:
            call = waiting.pop(which % len(waiting))
            hits.left(call)
            gone.append((call, call.hit_tokens))
        elif kind == "keep":
            _keep(journal, CHAINS[which], number)
        elif kind == "follow":
            hits.follow()
            for call in waiting:
                assert call.hit_tokens == 64 * len(list(takewhile(journal.stored.__contains__, call.tree_blocks)))
    assert all(call.hit_tokens == tokens for call, tokens in gone), "nobody looks for the hits of calls that have left"


def _call(blocks: list[int], expected_blocks: int) -> SglangCall:
    tokens = 64 * len(blocks) + 1
    return SglangCall(
        "call", 0.0, tokens, order=(0.0, 0), received_s=0.0, tree_blocks=blocks, hit_tokens=64 * expected_blocks
    )


def _keep(journal: CacheJournal, blocks: list[int], number: int) -> None:
    """Store the first `number` blocks of a chain, and remove the others."""
    for parent, block in zip((None, *blocks), blocks[:number], strict=False):
        journal.store(block, parent)
    for block in reversed(blocks[number:]):
        journal.remove(block)
