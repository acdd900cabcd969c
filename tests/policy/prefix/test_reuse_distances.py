"""Reuse distances against a list of blocks in the order of their uses, and against simulated LRU caches."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.reuse_distances import BOUNDS_TOKENS, MOST_FOLLOWED, ONE_OF, ReuseDistances
from tests.invariants import check

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=30)  # heavily shared: three different blocks


class Stack:
    """All blocks, the latest first: those of a prompt in their order, because all were used at once."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def used(self, hashes: Sequence[int]) -> list[float]:
        distances = [self.blocks.index(block) + 1 if block in self.blocks else inf for block in hashes]
        self.blocks = [*hashes, *(block for block in self.blocks if block not in hashes)]
        return distances


class LruCache:
    """A cache of a size that evicts prompts from their ends, as engines do."""

    def __init__(self, size_blocks: int) -> None:
        self._size_blocks = size_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def used(self, hashes: Sequence[int]) -> int:
        """How many blocks of a prompt's beginning are here. Then all of them come here."""
        hits = next((index for index, block in enumerate(hashes) if block not in self._blocks), len(hashes))
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._size_blocks:
            self._blocks.popitem(last=False)
        return hits


def sessions(random: Random, prompts: int, *, live: int, systems: int = 3) -> Iterator[array[int]]:
    """Prompts of sessions that grow and begin anew, behind one of few system prompts, some much more than others."""

    def blocks(count: int) -> array[int]:
        return array("Q", (random.getrandbits(64) for _ in range(count)))

    heads = [blocks(20) for _ in range(systems)]
    said = [random.choice(heads)[:] for _ in range(live)]
    for _ in range(prompts):
        one = min(int(random.paretovariate(0.7)) - 1, live - 1)
        if len(said[one]) > 120 or random.random() < 0.1:
            said[one] = random.choice(heads)[:]
        said[one] += blocks(1 + int(random.expovariate(1 / 6)))
        yield said[one][:]


@settings(deadline=None)
@given(prompts=PROMPTS, block_tokens=st.sampled_from((64, 80)))
def test_with_all_blocks_followed_distances_are_those_of_a_stack(prompts: list[list[int]], block_tokens: int) -> None:
    found, stack = ReuseDistances(block_tokens, one_of=1), Stack()
    for tokens in prompts:
        hashes = chain(tokens, 1, 0)
        assert [*found.used(hashes)] == [distance * block_tokens for distance in stack.used(hashes)]
        check(found)


@settings(deadline=None)
@given(prompts=PROMPTS, most=st.integers(2, 12))
def test_what_was_used_longest_ago_is_dropped_and_all_other_distances_are_exact(
    prompts: list[list[int]], most: int
) -> None:
    found, stack = ReuseDistances(64, one_of=1, most_followed=most), Stack()
    for tokens in prompts:
        hashes = chain(tokens, 1, 0)
        for distance, exact in zip(found.used(hashes), stack.used(hashes), strict=True):
            assert distance == exact * 64 or (distance == inf and exact > most // 2)
        check(found)


@settings(deadline=None)
@given(prompts=PROMPTS)
def test_sampled_distances_never_fall_along_a_prompt_and_figures_never_fall(prompts: list[list[int]]) -> None:
    found, before = ReuseDistances(64, one_of=2), [0] * 18
    for tokens in prompts:
        distances = [*found.used(chain(tokens, 1, 0))]
        assert distances == sorted(distances)
        check(found)
        now = found.within_tokens()
        assert now == sorted(now)
        assert all(one <= other for one, other in zip(before, now, strict=True))
        before = now


def test_hits_are_those_of_lru_caches_of_each_size() -> None:
    found = ReuseDistances(64, one_of=1)
    sizes = [bound // 64 for bound in BOUNDS_TOKENS[:6]]
    caches, hits, used = [LruCache(size) for size in sizes], [0] * len(sizes), 0
    for hashes in sessions(Random(1), 1_500, live=60):
        found.used(hashes)
        used += len(hashes)
        hits = [hit + cache.used(hashes) for hit, cache in zip(hits, caches, strict=True)]
    within = found.within_tokens()
    assert within[:6] == [64 * hit for hit in hits]
    assert within[-1] == 64 * used
    assert hits[0] < 0.6 * used < 0.85 * used < hits[5]  # the sizes differ


@pytest.mark.no_cover
@pytest.mark.parametrize("one_of", [32, ONE_OF])
def test_sampled_hit_rates_are_near_those_of_all_blocks(one_of: int) -> None:
    """From half a million tokens on. Of the sixty blocks of the system prompts none may be followed, or too many."""
    errors = list[float]()
    for seed in range(4):
        exact, found = ReuseDistances(64, one_of=1, most_followed=10**6), ReuseDistances(64, one_of=one_of)
        for hashes in sessions(Random(seed), 3_000, live=400):
            exact.used(hashes)
            found.used(hashes)
        true, sampled = exact.within_tokens(), found.within_tokens()
        assert sampled[-1] == true[-1]
        errors += [abs(one - other) / true[-1] for one, other in zip(true[6:12], sampled[6:12], strict=True)]
    assert sum(errors) / len(errors) < (0.01 if one_of == 32 else 0.03)


def test_a_hot_prefix_is_a_hit_whether_its_blocks_are_followed_or_not() -> None:
    random, followed = Random(3), 0
    for _ in range(30):
        hot, found = array("Q", (random.getrandbits(64) for _ in range(40))), ReuseDistances(64)
        followed += bool(found.used(hot))
        for _ in range(200):
            found.used(hot)
        within = found.within_tokens()
        assert within[0] >= 0.95 * within[-1] - 64 * ONE_OF
    assert 0 < followed < 30


def test_the_memory_is_bounded_and_reaches_beyond_the_last_bound() -> None:
    found, first = ReuseDistances(64), array("Q", [1 << 8])
    found.used(first)
    for start in range(2, BOUNDS_TOKENS[-1] // (64 * ONE_OF), 500):
        found.used(array("Q", (number << 8 for number in range(start, start + 500))))
    (distance,) = found.used(first)
    assert BOUNDS_TOKENS[-1] - 500 * 64 * ONE_OF < distance < inf
    for start in range(10**6, 10**6 + MOST_FOLLOWED, 500):
        found.used(array("Q", (number << 8 for number in range(start, start + 500))))
        assert len(found._last) <= MOST_FOLLOWED
    assert [*found.used(first)] == [inf]
    check(found)


def test_hashes_may_come_as_any_sequence() -> None:
    found = ReuseDistances(64)
    assert [*found.used((256, 1, 512))] == [inf, inf]
    assert [*found.used([256, 1, 512])] == [64.0, 3 * 64.0]
    assert [*found.used(())] == []
    assert BOUNDS_TOKENS[-1] < MOST_FOLLOWED * 64 * ONE_OF
