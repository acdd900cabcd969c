"""From a cache's events with the media of two tiers to a journal of each; and what is known of host memory's link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.sglang.cache_state import CacheObserver
from plait.backends.sglang.host_tier import host_tier
from plait.policy.prefix.block_hash import chain, root_hash
from tests.examples import examples

PAGE_TOKENS = 32
"""Two are a tree block."""


class BlockStored(msgspec.Struct):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    medium: str | None
    block_size: int = PAGE_TOKENS


class BlockRemoved(msgspec.Struct):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct):
    pass


Path = tuple[int, ...]


def tokens_of(path: Path) -> list[int]:
    return [number for number in path for _ in range(PAGE_TOKENS)]


def tree_blocks(path: Path) -> Sequence[int]:
    return chain(tokens_of(path), 2 * PAGE_TOKENS, root_hash("m"))


def stored(path: Path, medium: str | None) -> BlockStored:
    """The last page of a path."""
    return BlockStored([hash(path)], hash(path[:-1]) if len(path) > 1 else None, tokens_of(path[-1:]), medium)


def named(journal: CacheJournal) -> dict[int, int | None]:
    _, runs, _ = journal.since(None)
    return {block: parent for run in runs for parent, block in zip([run.parent, *run.hashes], run.hashes, strict=False)}


def expected(paths: Iterable[Path]) -> dict[int, int | None]:
    """The tree blocks that end with the last pages of these paths."""
    whole = [tree_blocks(path) for path in paths if len(path) % 2 == 0]
    return {blocks[-1]: blocks[-2] if len(blocks) > 1 else None for blocks in whole}


paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_each_tree_block_is_in_its_fastest_tier(data: st.DataObject) -> None:
    """As SGLang's radix tree does: a page comes after its parent and goes before it, in the two tiers together."""
    observer = CacheObserver(page_tokens=PAGE_TOKENS, model="m")
    device: set[Path] = set()
    host: set[Path] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        path: Path = data.draw(paths)
        parents = {path[:end] for end in range(1, len(path))}
        children = {one for one in device | host if len(one) > len(path) and one[: len(path)] == path}
        in_host: bool = data.draw(st.booleans())
        tier, other, medium = (host, device, "CPU_PINNED") if in_host else (device, host, "GPU")
        if path in tier and (path in other or not children) and (in_host or not children & device):
            tier.remove(path)
            observer.observe([BlockRemoved([hash(path)], medium)])
        elif path not in tier and parents <= (device | host if in_host else device):
            tier.add(path)
            observer.observe([stored(path, medium)])
        elif data.draw(st.integers(0, 20)) == 0:
            device.clear()
            host.clear()
            observer.observe([AllBlocksCleared()])
        assert named(observer.journal) == expected(device)
        assert named(observer.host) == expected(host - device)
        assert len(observer._pages) == len(device | host), "nothing is kept of what no tier has"


class Radix:
    """Prompts in pages of some size, on the accelerator and in host memory: pages by the tokens up to their ends."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.observer = CacheObserver(page_tokens=page_tokens, model="m")
        self.device: set[Path] = set()
        self.host: set[Path] = set()
        self.prompts: list[Path] = []

    def store(self, prompt: Path, medium: str) -> None:
        tier = self.host if medium == "CPU" else self.device
        ends = [end for end in range(self.page_tokens, len(prompt) + 1, self.page_tokens) if prompt[:end] not in tier]
        self.prompts.append(prompt)
        if not ends:
            return
        start = ends[0] - self.page_tokens
        tier.update(prompt[:end] for end in ends)
        keys, parent = [hash(prompt[:end]) for end in ends], hash(prompt[:start]) if start else None
        self.observer.observe([BlockStored(keys, parent, [*prompt[start : ends[-1]]], medium, self.page_tokens)])

    def evict(self, page: Path, medium: str) -> None:
        (self.host if medium == "CPU" else self.device).remove(page)
        self.observer.observe([BlockRemoved([hash(page)], medium)])

    def leaves(self, tier: set[Path]) -> list[Path]:
        """The pages that may leave a tier: none behind them is there, or the accelerator's that host memory has."""
        both = self.device | self.host
        behind = {one[: -self.page_tokens] for one in both}
        return sorted(one for one in tier if one not in behind)

    def check(self) -> None:
        device, host = dict[int, int | None](), dict[int, int | None]()
        for prompt in self.prompts:
            hashes = chain(prompt, 64, root_hash("m"))
            for index, block in enumerate(hashes):
                end = -(-64 * (index + 1) // self.page_tokens) * self.page_tokens
                for tier, told in ((self.device, device), (self.host, host)):
                    if end <= len(prompt) and prompt[:end] in tier:
                        told[block] = hashes[index - 1] if index else None
        assert named(self.observer.journal) == device
        assert named(self.observer.host) == {block: host[block] for block in host.keys() - device.keys()}


@settings(deadline=None, max_examples=examples(100))
@given(page_tokens=st.sampled_from((1, 16, 24, 48, 64, 80, 128, 528)), data=st.data())
def test_reports_are_what_the_cache_has_with_pages_of_any_size(page_tokens: int, data: st.DataObject) -> None:
    cache = Radix(page_tokens)
    for number in range(data.draw(st.integers(1, 12))):
        act = data.draw(st.sampled_from(("GPU", "GPU", "CPU", "evict")))
        tier, medium = (cache.host, "CPU") if data.draw(st.booleans()) else (cache.device, "GPU")
        if act == "evict":
            for _ in range(data.draw(st.integers(1, 400 // page_tokens + 1))):
                if leaves := cache.leaves(tier):
                    cache.evict(data.draw(st.sampled_from(leaves)), medium)
        else:
            shared, own = data.draw(st.integers(0, 600)), data.draw(st.integers(0, 100))
            cache.store((data.draw(st.integers(0, 1)),) * shared + (100 + number,) * own, act)
        cache.check()


def test_a_copy_in_host_memory_changes_nothing_while_the_accelerator_has_one() -> None:
    observer = CacheObserver(page_tokens=PAGE_TOKENS, model="m")
    observer.observe([stored((1,), "GPU"), stored((1, 2), None)])
    cursor = observer.journal.cursor
    observer.observe([stored((1,), "CPU"), stored((1, 2), "CPU"), BlockRemoved([hash((1, 2))], "CPU")])
    assert observer.journal.cursor == cursor


def test_other_media_and_removals_of_what_is_not_there_are_left_out() -> None:
    observer = CacheObserver(page_tokens=PAGE_TOKENS, model="m")
    observer.observe([stored((1,), "DISK"), stored((1, 2), "EXTERNAL"), BlockRemoved([hash((1, 2))], "CPU")])
    observer.observe([stored((1,), "CPU"), stored((1, 2), "CPU"), BlockRemoved([hash((1, 2))], "GPU")])
    assert (named(observer.journal), named(observer.host)) == ({}, expected([(1, 2)]))


def tree_cache(**attributes: Any) -> Any:
    pool = SimpleNamespace(size=6400)
    return SimpleNamespace(cache_controller=SimpleNamespace(mem_pool_host=pool), metrics_collector=None, **attributes)


@pytest.mark.parametrize(
    "cache",
    [
        SimpleNamespace(),
        SimpleNamespace(cache_controller=None),
        SimpleNamespace(cache_controller=SimpleNamespace()),
        tree_cache(host_memory_mode="buffer_only"),
    ],
)
def test_without_pages_in_host_memory_there_is_no_tier(cache: Any) -> None:
    assert host_tier(cache, CacheJournal(), PAGE_TOKENS) is None


class Collector:
    def __init__(self) -> None:
        self.counted: list[Any] = []

    def increment_load_back_num_bytes(self, num_bytes: int) -> None: ...

    def increment_load_back_num_tokens(self, num_tokens: int, pool: str) -> None:
        self.counted.append((num_tokens, pool))

    def observe_load_back_duration(self, duration_seconds: float) -> None:
        self.counted.append(duration_seconds)


def test_its_size_and_what_was_loaded() -> None:
    cache, collector = tree_cache(), Collector()
    cache.metrics_collector = collector
    tier = host_tier(cache, CacheJournal(), PAGE_TOKENS)
    assert tier is not None
    collector.increment_load_back_num_tokens(num_tokens=64, pool="kv")
    collector.increment_load_back_num_tokens(num_tokens=8, pool="swa")
    assert tier.loaded_tokens == 0, "their time is not told yet"
    collector.observe_load_back_duration(0.5)
    report = tier.since(None)
    assert (report.tier, report.total_blocks, report.loaded_tokens, report.loading_s) == ("host", 200, 64, 0.5)
    assert collector.counted == [(64, "kv"), (8, "swa"), 0.5]


def test_an_older_version_does_not_tell_what_was_loaded() -> None:
    cache = tree_cache()
    cache.metrics_collector = SimpleNamespace(increment_load_back_num_tokens=len, observe_load_back_duration=len)
    tier = host_tier(cache, CacheJournal(), PAGE_TOKENS)
    assert tier is not None
    assert cache.metrics_collector.observe_load_back_duration is len
