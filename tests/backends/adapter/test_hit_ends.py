"""The ends of hits, held against a search of each chain from its end."""

from __future__ import annotations

import random
from math import inf

import pytest

from plait.backends.adapter.cache_journal import Changes
from plait.backends.adapter.hit_ends import MOST_NOTES, EngineEnds, Kind
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, chain, whole_hash

Chain = tuple[int, ...]


class Cache:
    """What each group of layers has, as sets of keys, and chains that branch at random."""

    def __init__(self, seed: int, kinds: list[Kind], *, key_tokens: int, align_tokens: int) -> None:
        self.random = random.Random(seed)
        self.kinds, self.key_tokens, self.align_tokens = kinds, key_tokens, align_tokens
        self.have = {group: set[int]() for kind in kinds for group in kind.groups}
        self.ends = EngineEnds[int](
            kinds,
            lambda key: sum((key in have) << group for group, have in self.have.items()),
            Changes(),
            key_tokens=key_tokens,
            align_tokens=align_tokens,
        )
        self.prompts: list[list[int]] = []

    def keys(self, tokens: list[int]) -> Chain:
        return tuple(chain(tokens, self.key_tokens, 1))

    def prompt(self) -> list[int]:
        """A new prompt, which shares a part with an earlier one."""
        shared = self.random.choice([*self.prompts, []])
        shared = shared[: self.random.randrange(len(shared) + 1)]
        tokens = [*shared, *(self.random.randrange(9) for _ in range(self.random.randrange(20, 400)))]
        self.prompts.append(tokens)
        return tokens

    def of_kind(self, keys: Chain, kind: Kind) -> list[int]:
        step = kind.block_tokens // self.key_tokens
        return list(keys[step - 1 :: step])

    def compute(self, tokens: list[int]) -> None:
        """Compute a prompt in pieces; groups without full attention keep a random part of it."""
        keys, done = self.keys(tokens), 0
        while done < len(tokens):
            end = min(len(tokens), done + self.random.randrange(1, 200))
            for kind in self.kinds:
                first, last = done // kind.block_tokens, end // kind.block_tokens
                kept = 0 if kind.needed == inf else self.random.choice([first, max(first, last - 6), last])
                for key in self.of_kind(keys, kind)[max(first, kept) : last]:
                    for group in kind.groups:
                        self.have[group].add(key)
                        self.ends.changed(key)
            names = chain(tokens, TREE_BLOCK_TOKENS, 7)
            start, stop = done // self.align_tokens * self.align_tokens // TREE_BLOCK_TOKENS, end // TREE_BLOCK_TOKENS
            self.ends.computed(keys, done, end, start, names[start:stop], tokens)
            done = end

    def evict(self) -> None:
        for have in self.have.values():
            for key in self.random.sample(sorted(have), min(len(have), self.random.randrange(6))):
                have.discard(key)
                self.ends.changed(key)

    def hit(self, tokens: list[int], most: int) -> int:
        """The oracle: the longest multiple of the alignment that all kinds accept."""
        keys = self.keys(tokens)
        for end in range(min(most, len(tokens)) // self.align_tokens * self.align_tokens, 0, -self.align_tokens):
            if all(self.accepts(self.of_kind(keys, kind), kind, end) for kind in self.kinds):
                return end
        return 0

    def accepts(self, keys: list[int], kind: Kind, end: int) -> bool:
        blocks = end // kind.block_tokens
        needed = keys[max(0, blocks - int(min(kind.needed, blocks))) : blocks]
        return all(key in self.have[group] for key in needed for group in kind.groups)


KINDS = [
    ([Kind((0,), 16), Kind((1, 2), 16, 4)], 16, 16),
    ([Kind((0,), 16), Kind((1,), 16, 1), Kind((2,), 16, 7)], 16, 16),
    ([Kind((0,), 64), Kind((1,), 64, 1)], 64, 64),
    ([Kind((0,), 32), Kind((1,), 16, 3)], 16, 32),
    ([Kind((0,), 16), Kind((1,), 48, 2)], 16, 48),
    ([Kind((0,), 128), Kind((1,), 128, 1)], 128, 128),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("kinds", "key_tokens", "align_tokens"), KINDS)
def test_the_deepest_end_is_that_of_a_search(kinds: list[Kind], key_tokens: int, align_tokens: int, seed: int) -> None:
    cache = Cache(seed, kinds, key_tokens=key_tokens, align_tokens=align_tokens)
    told = set[int]()
    cursor = 0
    for _ in range(60):
        cache.compute(cache.prompt()) if cache.random.random() < 0.6 else cache.evict()
        before = {id(tokens): cache.ends.deepest(cache.keys(tokens), len(tokens)) for tokens in cache.prompts}
        changes = cache.ends.changes
        cache.evict()
        for tokens in cache.prompts:
            keys = cache.keys(tokens)
            hit = cache.ends.deepest(keys, len(tokens), cache.random.randrange(len(tokens)))
            assert hit == cache.hit(tokens, len(tokens))
            if hit != before[id(tokens)]:
                assert cache.ends.has_changed(keys, changes, before[id(tokens)])
            most = cache.random.randrange(len(tokens))
            assert cache.ends.deepest(keys, most) == cache.hit(tokens, most)
        report = cache.ends.since(cursor, told)
        cursor = cache.ends.journal.cursor
        told.difference_update(report.closed)
        assert not set(report.closed) & {last for last, _ in report.opened}
        names = set[int]()
        for tokens in cache.prompts:
            path = chain(tokens, TREE_BLOCK_TOKENS, 7)
            for end in range(align_tokens, len(tokens) + 1, align_tokens):
                if cache.ends.deepest(cache.keys(tokens), end) == end and end >= TREE_BLOCK_TOKENS:
                    rest = end % TREE_BLOCK_TOKENS
                    names.add(whole_hash(tokens[end - rest : end], path[end // TREE_BLOCK_TOKENS - 1]))
            for last, blocks in report.opened:
                if last in path:
                    end = path.index(last) + 1
                    told.update(path[end - blocks : end])
        for before_it, inner, name in report.inside:
            assert any(
                whole_hash(tokens[place * TREE_BLOCK_TOKENS :][:inner], before_it) == name
                for tokens in cache.prompts
                for place, block in enumerate(chain(tokens, TREE_BLOCK_TOKENS, 7), 1)
                if block == before_it
            )
            told.add(name)
        assert told == names


def test_after_a_reset_there_is_no_end() -> None:
    cache = Cache(1, *KINDS[0][:1], key_tokens=16, align_tokens=16)
    tokens = cache.prompt()
    cache.compute(tokens)
    cache.ends.settle()
    cache.ends.clear()
    assert cache.ends.deepest(cache.keys(tokens), len(tokens)) == 0
    assert cache.ends.since(None, ()).opened == []


def test_an_end_that_tokens_do_not_name_is_not_told() -> None:
    kinds = [Kind((0,), 16), Kind((1,), 16, 2)]
    have = set[int]()
    ends = EngineEnds[int](kinds, lambda key: 3 * (key in have), Changes(), key_tokens=16, align_tokens=16)
    tokens = list(range(96))
    keys, names = tuple(chain(tokens, 16, 1)), chain(tokens, TREE_BLOCK_TOKENS, 7)
    have.update(keys)
    ends.computed(keys, 0, 96, 0, names, tokens[:80])
    ends.settle()
    assert ends.deepest(keys, 96) == 96
    told = ends.since(None, set(names))
    assert [(tokens, name) for _, tokens, name in told.inside] == [(16, whole_hash(tokens[64:80], names[0]))]


def test_notes_are_decided_before_they_are_many() -> None:
    kinds = [Kind((0,), 16), Kind((1,), 16, 2)]
    ends = EngineEnds[int](kinds, lambda _: 0, Changes(), key_tokens=16, align_tokens=16)
    for number in range(3 * MOST_NOTES):
        ends.computed((number,), 0, 16, 0, (), ())
    assert len(ends._computed) <= MOST_NOTES + 1
