"""Each tree block is reported in its fastest tier, whatever comes, goes, is offloaded and is dropped."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.vllm.tiered_blocks import TieredBlocks
from tests.backends.vllm.test_tree_blocks import WIDTH, keys_of, tree_block_of
from tests.examples import examples

Path = tuple[int, ...]


def named(journal: CacheJournal) -> dict[int, int | None]:
    _, runs, _ = journal.since(None)
    return {block: parent for run in runs for parent, block in zip([run.parent, *run.hashes], run.hashes, strict=False)}


class Engine:
    """Holds copies of blocks on the accelerator, and chunks of `width` blocks in host memory, like vLLM.

    A name is known from the time when the accelerator caches a block. `needed` are the paths to blocks whose names are.
    """

    def __init__(self, width: int) -> None:
        self.journal = CacheJournal()
        self.blocks = TieredBlocks(self.journal, width)
        self.width = width
        self.copies: Counter[Path] = Counter()
        self.host: set[Path] = set()
        self.under_way: set[Path] = set()
        self.needed: set[Path] = set()

    def cache(self, path: Path, first: int) -> None:
        """A request computed or loaded the blocks of `path` from `first` on; what is before was there."""
        keys = keys_of(path)
        for index in range(first, len(path)):
            self.copies[path[: index + 1]] += 1
            self.needed.add(path[: index + 1])
            self.blocks.inserted(keys[index])
        self.blocks.chunked([SimpleNamespace(block_hash=key) for key in keys], first, len(path))
        for end in range(WIDTH, len(path) + 1, WIDTH):
            if end > first:
                parent = tree_block_of(path[: end - WIDTH]) if end > WIDTH else None
                self.blocks.composed(tree_block_of(path[:end]), parent, keys[end - WIDTH : end])

    def evict(self, path: Path) -> None:
        self.copies[path] -= 1
        if not self.copies[path]:
            del self.copies[path]
        self.blocks.removed(bytes(path))

    def begin(self, chunk: Path) -> None:
        self.under_way.add(chunk)
        self.blocks.storing([bytes(chunk)])

    def end(self, chunk: Path, *, success: bool) -> None:
        self.under_way.remove(chunk)
        if success:
            self.host.add(chunk)
        (self.blocks.stored if success else self.blocks.failed)([bytes(chunk)])

    def drop(self, chunk: Path) -> None:
        self.host.remove(chunk)
        self.blocks.dropped([bytes(chunk)])

    def end_step(self) -> None:
        self.needed &= {*self.copies, *self.parts(self.host), *self.parts(self.under_way)}
        self.blocks.end_step()

    def clear(self) -> None:
        self.copies.clear()
        self.blocks.clear()

    def parts(self, chunks: set[Path]) -> set[Path]:
        return {chunk[:end] for chunk in chunks for end in range(len(chunk) - self.width + 1, len(chunk) + 1)}

    def check(self) -> None:
        reachable = {*self.copies, *self.parts(self.host)}
        device, host = {}, {}
        for path in self.needed:
            if len(path) % WIDTH == 0:
                parts = {path[:end] for end in range(len(path) - WIDTH + 1, len(path) + 1)}
                parent = tree_block_of(path[:-WIDTH]) if len(path) > WIDTH else None
                if parts <= self.copies.keys():
                    device[tree_block_of(path)] = parent
                elif parts <= reachable:
                    host[tree_block_of(path)] = parent
        assert named(self.journal) == device
        assert named(self.blocks.host) == host
        assert self.blocks.copies == {bytes(path): copies for path, copies in self.copies.items()}


paths = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@settings(deadline=None, max_examples=examples(80))
@given(data=st.data())
def test_each_tree_block_is_in_its_fastest_tier(width: int, data: st.DataObject) -> None:
    engine = Engine(width)
    for _ in range(data.draw(st.integers(1, 30))):
        act(engine, data)
        engine.check()
    for chunk in sorted(engine.under_way):
        engine.end(chunk, success=False)
    engine.blocks.dropped_all()
    engine.host.clear()
    engine.clear()
    engine.check()
    engine.end_step()
    kept = ("_parts", "_offloaded", "_under_way", "_lost", "copies")
    assert not any(getattr(engine.blocks, name) for name in kept), "nothing is kept of what no tier has"


def act(engine: Engine, data: st.DataObject) -> None:
    """Draw one thing that may happen, and let it happen."""
    chunks = {path for path in engine.needed if len(path) % engine.width == 0} - engine.host - engine.under_way
    acts = {
        "evict": engine.copies,
        "begin": chunks,
        "end": engine.under_way,
        "drop": engine.host,
    }
    what: str = data.draw(st.sampled_from(["cache", "end step", "clear", *(name for name in acts if acts[name])]))
    chosen: Path = data.draw(st.sampled_from(sorted(acts[what]))) if what in acts else ()
    if what == "cache":
        path = data.draw(paths)
        held = next((end for end in range(len(path)) if path[: end + 1] not in engine.copies), len(path))
        engine.cache(path, data.draw(st.integers(0, held)))
    elif what == "end step":
        engine.end_step()
    elif what == "clear":
        engine.clear()
    elif what == "evict":
        engine.evict(chosen)
    elif what == "begin":
        engine.begin(chosen)
    elif what == "end":
        engine.end(chosen, success=data.draw(st.booleans()))
    else:
        engine.drop(chosen)


def test_a_copy_in_host_memory_changes_nothing_while_the_accelerator_has_one() -> None:
    engine = Engine(WIDTH)
    engine.cache((0, 0, 0), 0)
    cursor = engine.journal.cursor
    engine.begin((0, 0, 0))
    engine.end((0, 0, 0), success=True)
    engine.drop((0, 0, 0))
    assert engine.journal.cursor == cursor


def test_a_move_is_two_changes_whatever_happens_to_the_other_blocks() -> None:
    engine, path = Engine(WIDTH), (0, 0, 0)
    engine.cache(path, 0)
    engine.begin(path)
    engine.end(path, success=True)
    cursor = engine.journal.cursor
    for end in (3, 2, 1):
        engine.evict(path[:end])
        assert engine.journal.cursor == cursor + 2
        engine.check()
    engine.cache(path, 0)
    assert engine.journal.cursor == cursor + 4
    engine.check()


@pytest.mark.parametrize("width", [1, 2])
def test_a_chunk_from_below_host_memory_is_named_once_the_accelerator_loads_it(width: int) -> None:
    blocks = TieredBlocks(CacheJournal(), width)
    path = (0,) * 6
    chunks = [bytes(path[:end]) for end in range(width, 7, width)]
    blocks.storing(chunks)
    blocks.stored(chunks)
    blocks.end_step()
    assert not blocks.host.stored
    keys = keys_of(path)
    for key in keys:
        blocks.inserted(key)
    blocks.chunked([SimpleNamespace(block_hash=key) for key in keys], 0, 6)
    blocks.composed(tree_block_of(path[:3]), None, keys[:3])
    assert not blocks.host.stored
    for key in keys:
        blocks.removed(key)
    assert list(blocks.host.stored) == [tree_block_of(path[:3])]


def test_a_transfer_that_vllm_has_given_up_brings_nothing() -> None:
    engine = Engine(1)
    engine.cache((0, 0, 0), 0)
    engine.begin((0, 0, 0))
    engine.blocks.dropped_all()
    engine.blocks.stored([bytes((0, 0, 0))])
    engine.evict((0, 0, 0))
    assert not engine.blocks.host.stored
    assert engine.blocks.tree_block(bytes((0, 0, 0))) is None
