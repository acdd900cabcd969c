"""Engine blocks to tree blocks: the journal holds exactly those tree blocks whose engine blocks all have a copy."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.tree_block_tiers import TreeBlockTiers
from plait.backends.vllm.tree_blocks import TreeBlocks
from tests.examples import examples

WIDTH = 3
"""Engine blocks of a tree block."""


def keys_of(path: tuple[int, ...]) -> list[bytes]:
    """The chained keys of the engine blocks with these contents."""
    return [bytes(path[: end + 1]) for end in range(len(path))]


def tree_block_of(path: tuple[int, ...]) -> int:
    return int.from_bytes(bytes([1, *path]), "big")


class Engine:
    """Holds copies of blocks like vLLM: a request's blocks get in from the front, any copy may leave at any time."""

    def __init__(self) -> None:
        self.journal = CacheJournal()
        self.tree_blocks = TreeBlocks(TreeBlockTiers(self.journal))
        self.copies: Counter[bytes] = Counter()
        self.paths: set[tuple[int, ...]] = set()

    def cache(self, path: tuple[int, ...], first: int) -> None:
        """A request computed the blocks of `path` from `first` on; what is before was there."""
        keys = keys_of(path)
        for index in range(first, len(path)):
            self.copies[keys[index]] += 1
            self.tree_blocks.inserted(keys[index])
        for end in range(WIDTH, len(path) + 1, WIDTH):
            self.paths.add(path[:end])
            if end > first:
                parent = tree_block_of(path[: end - WIDTH]) if end > WIDTH else None
                self.tree_blocks.composed(tree_block_of(path[:end]), parent, keys[end - WIDTH : end])

    def evict(self, key: bytes) -> None:
        self.copies[key] -= 1
        if not self.copies[key]:
            del self.copies[key]
        self.tree_blocks.removed(key)

    def check(self) -> None:
        whole = {
            tree_block_of(path) for path in self.paths if all(key in self.copies for key in keys_of(path)[-WIDTH:])
        }
        _, runs, _ = self.journal.since(None)
        assert {block for run in runs for block in run.hashes} == whole
        assert self.tree_blocks.copies == self.copies


paths = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


@settings(deadline=None, max_examples=examples(300))
@given(data=st.data())
def test_a_tree_block_is_there_while_all_its_blocks_are(data: st.DataObject) -> None:
    engine = Engine()
    for _ in range(data.draw(st.integers(1, 25))):
        evicts: bool = data.draw(st.booleans())
        if evicts and engine.copies:
            engine.evict(data.draw(st.sampled_from(sorted(engine.copies))))
        else:
            path = data.draw(paths)
            held = next((n for n, key in enumerate(keys_of(path)) if key not in engine.copies), len(path))
            engine.cache(path, data.draw(st.integers(0, held)))
        engine.check()
    engine.tree_blocks.clear()
    assert not engine.journal.stored
    assert not engine.tree_blocks.copies


def test_the_last_copy_counts() -> None:
    engine = Engine()
    for _ in range(2):
        engine.cache((1, 1, 1), 0)
    last = keys_of((1, 1, 1))[-1]
    cursor = engine.journal.cursor
    engine.evict(last)
    assert engine.journal.cursor == cursor
    engine.evict(last)
    assert not engine.journal.stored


def test_tree_blocks_that_branch_share_their_first_blocks() -> None:
    engine = Engine()
    for end in (1, 2, 3):
        engine.cache((0, 0, end), 0 if end == 1 else 2)
    assert len(engine.journal.stored) == 3
    engine.evict(keys_of((0, 0))[0])
    assert not engine.journal.stored, "all of them lost a part"
    engine.cache((0,), 0)
    assert len(engine.journal.stored) == 3, "and have it again"


def test_one_tree_block_can_have_several_keys() -> None:
    journal = CacheJournal()
    blocks = TreeBlocks(TreeBlockTiers(journal))
    for key in (b"seen from here", b"seen from there"):
        blocks.inserted(key)
        blocks.composed(5, None, [key])
    blocks.removed(b"seen from here")
    assert 5 in journal.stored
    blocks.removed(b"seen from there")
    assert 5 not in journal.stored
