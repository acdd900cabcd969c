"""The journal against its whole history: from any past state, a report leads to the present one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.adapter.cache_journal import CacheJournal, Changes
from plait.backends.protocol.cache_state import StoredRun

Block = int
Parents = dict[Block, Block | None]


def follow(known: frozenset[Block], journal: CacheJournal, cursor: int | None, parents: Parents) -> frozenset[Block]:
    """What a follower that knew `known` knows after a report: removed first, then stored; a snapshot replaces all."""
    snapshot, stored, removed = journal.since(cursor)
    if snapshot:
        assert removed == []
        known = frozenset()
    blocks = set(known - set(removed))
    for run in stored:
        parent = run.parent
        for block in run.hashes:
            assert parents[block] == parent, "a run is one block behind the other"
            assert parent is None or parent in blocks, "parents come before their children"
            blocks.add(block)
            parent = block
    return frozenset(blocks)


@given(st.data(), st.sampled_from((0, 1, 3, 1_000)))
def test_from_any_past_cursor_a_report_leads_to_exactly_what_is_stored(data: st.DataObject, tombstones: int) -> None:
    """Blocks 0 to 14 are a binary tree; the engine stores behind what is stored and evicts leaves."""
    parents: Parents = {block: (block - 1) // 2 if block else None for block in range(15)}
    journal = CacheJournal(max_tombstones=tombstones)
    stored: set[Block] = set()
    history = {0: frozenset[Block]()}
    for _ in range(data.draw(st.integers(0, 40))):
        able = [b for b, parent in parents.items() if b not in stored and (parent is None or parent in stored)]
        leaves = [b for b in stored if not stored & {2 * b + 1, 2 * b + 2}]
        block = data.draw(st.sampled_from(sorted(able + leaves)))
        if block in stored:
            stored.remove(block)
            journal.remove(block)
        else:
            stored.add(block)
            journal.store(block, parents[block])
        assert journal.cursor not in history
        history[journal.cursor] = frozenset(stored)
        cursor = data.draw(st.sampled_from(sorted(history)))
        assert follow(history[cursor], journal, cursor, parents) == stored
        assert follow(frozenset(range(99, 102)), journal, None, parents) == stored
        assert journal.stored == stored


def test_a_delta_is_the_net_change() -> None:
    journal = CacheJournal()
    journal.store(1, None)
    journal.store(2, 1)
    seen = journal.cursor
    journal.remove(2)
    journal.store(3, 1)
    journal.remove(3)
    journal.store(4, 1)
    assert journal.since(seen) == (False, [StoredRun(1, [4])], [3, 2])
    journal.store(2, 1)
    assert journal.since(seen) == (False, [StoredRun(1, [4]), StoredRun(1, [2])], [3]), "removed and stored again"


def test_nothing_changed_is_an_empty_delta() -> None:
    journal = CacheJournal()
    assert journal.since(0) == (False, [], [])
    journal.store(1, None)
    assert journal.since(journal.cursor) == (False, [], [])


def test_storing_again_and_removing_what_is_not_there_are_no_changes() -> None:
    journal = CacheJournal()
    journal.store(1, None)
    journal.store(1, None)
    journal.remove(2)
    assert (journal.cursor, len(journal.stored)) == (1, 1)


def test_no_cursor_and_a_cursor_of_the_future_give_snapshots() -> None:
    journal = CacheJournal()
    journal.store(1, None)
    everything: tuple[bool, list[StoredRun], list[int]] = (True, [StoredRun(None, [1])], [])
    assert journal.since(None) == everything
    assert journal.since(journal.cursor + 1) == everything
    assert journal.since(-1) == everything


def test_a_forgotten_removal_gives_a_snapshot_to_those_who_missed_it_only() -> None:
    journal = CacheJournal(max_tombstones=1)
    for block in (1, 2, 3):
        journal.store(block, None)
    journal.remove(1)
    after_first = journal.cursor
    journal.remove(2)
    assert journal.since(after_first) == (False, [], [2])
    assert journal.since(after_first - 1) == (True, [StoredRun(None, [3])], [])


def test_blocks_one_behind_the_other_are_one_run() -> None:
    journal = CacheJournal()
    for block, parent in ((1, None), (2, 1), (3, 2), (10, 1), (11, 10), (20, None), (30, None)):
        journal.store(block, parent)
    runs = [StoredRun(None, [1, 2, 3]), StoredRun(1, [10, 11]), StoredRun(None, [20]), StoredRun(None, [30])]
    assert journal.since(None) == (True, runs, [])
    assert journal.since(2) == (False, [StoredRun(2, [3]), *runs[1:]], [])


def test_journals_that_share_their_changes_need_one_cursor() -> None:
    changes = Changes()
    device, host = CacheJournal(changes=changes), CacheJournal(changes=changes)
    device.store(1, None)
    device.store(2, 1)
    seen = device.cursor
    device.remove(2)
    host.store(2, 1)
    assert (device.cursor, device.changed_at) == (host.cursor, host.changed_at) == (seen + 2, seen + 2)
    assert device.since(seen) == (False, [], [2])
    assert host.since(seen) == (False, [StoredRun(1, [2])], [])


def test_a_report_on_all_journals_is_a_snapshot_if_one_of_them_has_forgotten() -> None:
    changes = Changes()
    device, host = CacheJournal(changes=changes), CacheJournal(max_tombstones=1, changes=changes)
    device.store(1, None)
    for block in (2, 3):
        host.store(block, 1)
    seen = device.cursor
    for block in (3, 2):
        host.remove(block)
    assert device.since(seen)[0]
    assert host.since(seen)[0]
