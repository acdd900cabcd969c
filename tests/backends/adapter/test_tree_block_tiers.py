"""Each tree block is journaled in the fastest tier that has a holder of it, whatever comes and goes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.tree_block_tiers import TreeBlockTiers

TIERS = 3


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, TIERS - 1), st.booleans()), max_size=60))
def test_the_fastest_tier_with_a_holder_has_the_block(changes: list[tuple[int, int, bool]]) -> None:
    first = CacheJournal()
    journals = [first, *(CacheJournal(changes=first.changes) for _ in range(TIERS - 1))]
    tiers, held = TreeBlockTiers(*journals), Counter[tuple[int, int]]()
    for block, tier, comes in changes:
        if comes:
            tiers.add(block, block - 1, tier)
            held[block, tier] += 1
        elif held[block, tier]:
            tiers.remove(block, block - 1, tier)
            held[block, tier] -= 1
        fastest = {one: min(place for place in range(TIERS) if held[one, place]) for one, _ in +held}
        told = {one: number for number, journal in enumerate(journals) for one in journal.stored}
        assert told == fastest


def test_a_holder_that_moves_is_one_change_of_its_blocks() -> None:
    device, host = CacheJournal(), CacheJournal()
    tiers = TreeBlockTiers(device, host)
    tiers.move([1, 2], None, None, 0)
    assert [run.hashes for run in device.since(None)[1]] == [[1, 2]]
    tiers.move([1, 2], None, 0, 1)
    assert (list(device.stored), list(host.stored)) == ([], [1, 2])
    cursor = host.cursor
    tiers.move([1, 2], None, 1, 1)
    assert host.cursor == cursor
    tiers.move([1, 2], None, 1, None)
    assert not host.stored
