"""The block cache against a list of blocks in the order of their last use."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from plait.lab.embedded.kv_blocks import BlockCache
from tests.examples import examples
from tests.invariants import check

Prefix = tuple[int, ...]
BLOCKS = 12
CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)  # two kinds of block: nearly all is shared


def name(prefix: Prefix) -> int:
    """A hash that stands for the whole prefix."""
    return int("1" + "".join(map(str, prefix)), 3)


def names(chain: Prefix) -> list[int]:
    return [name(chain[:end]) for end in range(1, len(chain) + 1)]


@dataclass(eq=False)
class Running:
    """A call: `blocks` hold the beginning of its chain, of which the first `registered` can be found."""

    chain: Prefix
    blocks: list[int]
    registered: int


@dataclass
class Lru:
    """The same in the plainest form: unused blocks from the first to be taken to the last, None without content."""

    idle: list[int | None]
    users: Counter[int] = field(default_factory=Counter)

    @property
    def known(self) -> set[int]:
        return {content for content in self.idle if content is not None} | set(+self.users)

    def use(self, content: int) -> None:
        if not self.users[content]:
            self.idle.remove(content)
        self.users[content] += 1

    def release(self, content: int | None) -> None:
        if content is None:
            self.idle.insert(0, None)
            return
        self.users[content] -= 1
        if not self.users[content]:
            self.idle.append(content)


class EngineUse(RuleBasedStateMachine):
    """Calls as the engine runs them: acquire what matches, allocate, register in order, release in prompt order."""

    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.cache = BlockCache(BLOCKS, self.evicted.append)
        self.lru = Lru([None] * BLOCKS)
        self.expected_evictions: list[int] = []
        self.running: list[Running] = []

    @rule(target=calls, chain=CHAINS, most=st.integers(0, 8))
    def admit(self, chain: Prefix, most: int) -> Running:
        matched = self.cache.match(names(chain)[:most])
        found = names(chain)[:matched]
        assert self.cache.idle(found, len(found)) == sum(content in self.lru.idle for content in found)
        blocks = self.cache.acquire(found)
        for content in found:
            self.lru.use(content)
        self.running.append(call := Running(chain, blocks, matched))
        return call

    @precondition(lambda self: self.cache.free_blocks > 0)
    @rule(call=calls, count=st.integers(1, 8))
    def compute(self, call: Running, count: int) -> None:
        count = min(count, len(call.chain) - len(call.blocks), self.cache.free_blocks)
        if call not in self.running or count <= 0:
            return
        call.blocks += self.cache.allocate(count)
        taken, self.lru.idle = self.lru.idle[:count], self.lru.idle[count:]
        self.expected_evictions += [content for content in taken if content is not None]

    @rule(call=calls, most=st.integers(1, 8))
    def register(self, call: Running, most: int) -> None:
        if call not in self.running:
            return
        for index in range(call.registered, min(len(call.blocks), call.registered + most)):
            content = names(call.chain)[index]
            exists = content in self.lru.known
            block = self.cache.register(call.blocks[index], content)
            assert (block != call.blocks[index]) == exists, "a prefix has one block"
            if exists:
                self.lru.use(content)
                self.lru.release(None)
            else:
                self.lru.users[content] = 1
            call.blocks[index] = block
            call.registered = index + 1

    @rule(call=consumes(calls))
    def release(self, call: Running) -> None:
        contents = [*names(call.chain)[: call.registered], *[None] * (len(call.blocks) - call.registered)]
        alone = sum(content is None or self.lru.users[content] == 1 for content in contents)
        assert self.cache.exclusive(call.blocks) == alone
        before = self.cache.free_blocks
        self.cache.release(call.blocks)
        assert self.cache.free_blocks == before + alone
        for content in reversed(contents):
            self.lru.release(content)
        self.running.remove(call)

    @rule(chain=CHAINS)
    def match(self, chain: Prefix) -> None:
        missing = [place for place, content in enumerate(names(chain)) if content not in self.lru.known]
        assert self.cache.match(names(chain)) == (missing[0] if missing else len(chain))

    @invariant()
    def it_agrees_with_the_list(self) -> None:
        check(self.cache)
        assert self.cache.free_blocks == len(self.lru.idle)
        assert self.cache.cached_blocks == sum(content is not None for content in self.lru.idle)
        assert self.evicted == self.expected_evictions

    @invariant()
    def what_is_cached_of_a_chain_is_a_prefix_of_it(self) -> None:
        assert all(content // 3 == 1 or content // 3 in self.lru.known for content in self.lru.known)


EngineUse.TestCase.settings = settings(max_examples=examples(150))
TestEngineUse = EngineUse.TestCase


def test_blocks_of_a_call_are_given_up_from_its_end() -> None:
    evicted: list[int] = []
    cache = BlockCache(3, evicted.append)
    blocks = cache.allocate(3)
    for block, block_hash in zip(blocks, (1, 2, 3), strict=True):
        cache.register(block, block_hash)
    cache.release(blocks)
    cache.allocate(2)
    assert evicted == [3, 2]
    assert cache.match([1, 2, 3]) == 1


def test_a_block_without_content_is_taken_before_a_cached_one() -> None:
    evicted: list[int] = []
    cache = BlockCache(2, evicted.append)
    cached, empty = cache.allocate(2)
    cache.register(cached, 1)
    cache.release([cached])
    cache.release([empty])
    assert cache.allocate(1) == [empty]
    assert evicted == []


def test_more_than_is_free_cannot_be_allocated() -> None:
    cache = BlockCache(1, lambda _: None)
    cache.allocate(1)
    with pytest.raises(KeyError):
        cache.allocate(1)
