"""Where hits can end, by reports and by the rule of an engine; held against a search of each prompt."""

from __future__ import annotations

import random
from array import array
from math import inf

import pytest

from plait.policy.prefix.block_hash import chain, whole_hash
from plait.policy.prefix.hit_ends import EndRule, HitEnds
from plait.policy.prefix.prefix_tree import Node, PrefixTree
from plait.policy.prefix.residency import Residency
from tests.invariants import check

BLOCK = 64
RULE = EndRule(BLOCK, 0, BLOCK)


def hashes(text: str) -> array[int]:
    return chain([ord(letter) for letter in text], 1, 0)


def engine(rule: EndRule = RULE) -> tuple[PrefixTree, Residency, HitEnds]:
    tree = PrefixTree()
    residency = Residency("a", tree)
    residency.use_rule(rule)
    assert residency.ends is not None
    return tree, residency, residency.ends


def held(tree: PrefixTree, residency: Residency, text: str) -> int:
    assert residency.ends is not None
    return residency.ends.hit(tree.match(hashes(text)), BLOCK * len(text) + 1).tokens // BLOCK


@pytest.mark.parametrize(
    ("align_tokens", "interval_tokens", "prompt_tokens", "shared_tokens", "ends"),
    [
        (64, 0, 641, 0, {0, 640}),
        (64, 0, 640, 0, {0, 576}),
        (32, 0, 100, 0, {0, 96}),
        (64, 0, 641, 330, {320, 640}),
        (64, 0, 641, 10_000, {640}),
        (528, 0, 1700, 1100, {1056, 1584}),
        (64, 256, 641, 0, {0, 256, 512, 640}),
        (64, 64, 192, 0, {0, 128}),
    ],
)
def test_a_call_leaves_ends_by_the_rule_of_its_engine(
    align_tokens: int, interval_tokens: int, prompt_tokens: int, shared_tokens: int, ends: set[int]
) -> None:
    assert EndRule(align_tokens, interval_tokens, BLOCK).left_by(prompt_tokens, shared_tokens) == ends


def test_a_prefix_counts_up_to_its_deepest_end() -> None:
    tree, residency, ends = engine()
    residency.resident.store(None, list(hashes("abcdef")))
    assert held(tree, residency, "abcdef") == 0
    ends.apply([(hashes("abcd")[-1], 1)], (), (), residency.resident.finder())
    assert [held(tree, residency, text) for text in ("abc", "abcd", "abcdef", "abcdz", "abcz")] == [0, 4, 4, 4, 0]
    ends.apply([(hashes("abcdef")[-1], 6)], (), [hashes("abcd")[-1]], residency.resident.finder())
    assert [held(tree, residency, text) for text in ("abc", "abcdef", "abz")] == [3, 6, 2]
    residency.resident.remove(hashes("abc")[-1])
    residency.resident.store(hashes("ab")[-1], list(hashes("abcdef")[2:]))
    assert held(tree, residency, "abcdef") == 2, "what was evicted and computed again has no end yet"


def test_a_booked_call_is_expected_to_leave_ends_until_a_report_after_its_first_token() -> None:
    tree, residency, ends = engine()
    leaf = tree.insert(hashes("abcdef"))
    computed_s = inf
    assert ends.hit(leaf.segments(), 6 * BLOCK) == (0, 0)
    residency.book(leaf, waits=True)
    ends.expect(leaf, RULE.left_by(6 * BLOCK, 0), (), lambda: computed_s)
    assert held(tree, residency, "abcdefg") == 5
    assert ends.hit(leaf.segments(), 6 * BLOCK, sent=True).tokens == 0
    residency.send(leaf)
    assert ends.hit(leaf.segments(), 6 * BLOCK, sent=True).tokens == 5 * BLOCK
    other = tree.insert(hashes("abcxyz"))
    assert ends.hit(other.segments(), 6 * BLOCK + 1) == (0, 3 * BLOCK)
    ends.confirm(1.0)
    assert held(tree, residency, "abcdefg") == 5
    computed_s = 2.0
    ends.confirm(1.5)
    assert held(tree, residency, "abcdefg") == 5
    ends.confirm(2.5)
    assert held(tree, residency, "abcdefg") == 0


@pytest.mark.parametrize("is_told", [False, True])
def test_an_end_inside_a_block_is_that_of_prompts_with_the_same_tokens(*, is_told: bool) -> None:
    tree = PrefixTree()
    residency = Residency("a", tree)
    residency.use_rule(EndRule(16, 0, BLOCK))
    ends = residency.ends
    assert ends is not None
    document, own, others = list(range(2 * BLOCK)), [7] * 40, [7] * 16 + [8] * 100
    path = chain(document, BLOCK, 0)
    leaf = tree.insert(path)
    prompt = document + own
    if is_told:
        residency.resident.store(None, path)
        name = whole_hash(own[:32], path[-1])
        ends.apply((), [(path[-1], 32, name)], (), residency.resident.finder())
    else:
        residency.book(leaf)
        ends.expect(leaf, [2 * BLOCK + 32], prompt, lambda: inf)

    def hit(tokens: list[int]) -> int:
        return ends.hit(tree.match(chain(tokens, BLOCK, 0)), len(tokens), tokens).tokens

    assert [hit(tokens) for tokens in (prompt, prompt + own, prompt[:-7], prompt[:-8], document + others)] == [
        *(2 * BLOCK + 32, 2 * BLOCK + 32, 2 * BLOCK + 32, 0, 0)
    ], "the last token is always computed"
    assert ends.hit(tree.match(path), len(prompt)).tokens == 2 * BLOCK + 32, "without tokens, nobody knows better"
    if is_told:
        ends.apply((), (), [name], residency.resident.finder())
    else:
        ends.confirm(inf)
    assert hit(prompt) == 0


def test_a_block_has_ends_after_itself_and_inside_the_next_one() -> None:
    tree, residency, ends = engine()
    path = chain(range(2 * BLOCK), BLOCK, 0)
    residency.resident.store(None, path)
    document = list(range(2 * BLOCK))
    one, two = document + [7] * 40, document + [8] * 40
    names = [whole_hash(prompt[2 * BLOCK :][:32], path[-1]) for prompt in (one, two)]
    ends.apply((), [(path[-1], 32, name) for name in names], (), residency.resident.finder())

    def hits() -> list[int]:
        prompts = (one, two, document + [9] * 40)
        return [ends.hit(tree.match(path), len(prompt), prompt).tokens - 2 * BLOCK for prompt in prompts]

    assert hits() == [32, 32, -2 * BLOCK]
    ends.apply([(path[-1], 1)], (), [names[0]], residency.resident.finder())
    assert hits() == [0, 32, 0]
    ends.apply((), (), [names[1]], residency.resident.finder())
    assert hits() == [0, 0, 0]
    ends.apply((), (), [path[-1]], residency.resident.finder())
    assert hits() == [-2 * BLOCK] * 3


def test_ends_expected_before_a_snapshot_are_taken_back_after_it() -> None:
    tree, residency, ends = engine()
    computed_s = inf
    leaf = tree.insert(hashes("abc"))
    residency.book(leaf)
    ends.expect(leaf, [3 * BLOCK], (), lambda: computed_s)
    residency.book(leaf)  # another call, which leaves no end there
    residency.clear()
    assert held(tree, residency, "abcd") == 3
    computed_s = 1.0
    ends.confirm(2.0)
    assert held(tree, residency, "abcd") == 0


def test_an_engine_that_tells_no_ends_any_more_has_no_expected_ones() -> None:
    tree, residency, ends = engine()
    leaf = tree.insert(hashes("abc"))
    residency.book(leaf)
    ends.expect(leaf, [3 * BLOCK], (), lambda: inf)
    residency.use_rule(None)
    residency.use_rule(RULE)
    assert held(tree, residency, "abcd") == 0


def test_a_call_leaves_all_ends_where_each_block_has_one() -> None:
    tree, residency, ends = engine(EndRule(16, 16, BLOCK))
    leaf = tree.insert(hashes("abcdef"))
    residency.book(leaf)
    ends.expect(leaf, ends.rule.left_by(6 * BLOCK, 0), (), lambda: inf)
    assert [held(tree, residency, text) for text in ("abx", "abcdefg")] == [2, 6]
    residency.unbook(leaf)
    assert held(tree, residency, "abx") == 0


class Model:
    """One engine's cache as sets of prefixes of texts, beside the residency that the same events reach."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.tree, self.residency, self.ends = engine()
        self.texts = ["".join(self.chance.choices("ab", [8, 1], k=self.chance.randrange(1, 24))) for _ in range(12)]
        self.resident, self.open = set[str](), set[str]()
        self.booked = list[tuple[Node, str, list[float]]]()
        self.expected = list[tuple[set[str], list[float]]]()

    def store(self, text: str) -> None:
        leading = sum(prefix in self.resident for prefix in prefixes(text))
        self.residency.resident.store(hashes(text)[leading - 1] if leading else None, list(hashes(text)[leading:]))
        self.resident.update(prefixes(text))

    def evict(self, text: str) -> None:
        gone = self.chance.choice(prefixes(text))
        self.residency.resident.remove(hashes(gone)[-1])
        self.resident = {one for one in self.resident if not one.startswith(gone)}
        self.open &= self.resident

    def book(self, text: str) -> None:
        leaf = self.tree.insert(hashes(text))
        self.residency.book(leaf)
        bits = self.chance.getrandbits(len(text)) & self.chance.getrandbits(len(text))
        computed_s = [inf]
        left = [BLOCK * (place + 1) for place in range(len(text)) if bits >> place & 1]
        self.ends.expect(leaf, left, (), lambda: computed_s[0])
        self.booked.append((leaf, text, computed_s))
        self.expected.append(({one for place, one in enumerate(prefixes(text)) if bits >> place & 1}, computed_s))

    def end(self) -> None:
        leaf, _, computed_s = self.booked.pop(self.chance.randrange(len(self.booked)))
        self.residency.unbook(leaf)
        self.residency.unshare(leaf)
        computed_s[0] = -inf
        for own, _ in self.expected:  # what nobody computes any more
            own.intersection_update([one for one in own if self.is_booked(one)])

    def report(self, text: str, now_s: float) -> None:
        self.tree.tidy()
        for _, _, computed_s in self.booked:
            computed_s[0] = min(computed_s[0], self.chance.choice([inf, now_s + 0.5, now_s - 0.5]))
        known = [prefix for prefix in prefixes(text) if prefix in self.resident]
        if known:
            last = self.chance.choice(known)
            blocks = self.chance.randrange(1, len(last) + 1)
            closed = self.chance.sample(sorted(self.open), min(2, len(self.open)))
            self.open -= set(closed)
            self.open.update(prefixes(last)[-blocks:])
            finder = self.residency.resident.finder()
            self.ends.apply([(hashes(last)[-1], blocks)], (), [hashes(one)[-1] for one in closed], finder)
        self.ends.confirm(now_s)
        self.expected = [(own, computed_s) for own, computed_s in self.expected if computed_s[0] > now_s]

    def is_booked(self, prefix: str) -> bool:
        return any(booking.startswith(prefix) for _, booking, _ in self.booked)

    def hit(self, text: str) -> int:
        """The oracle."""
        hit, coming = 0, set[str]().union(*(own for own, _ in self.expected))
        for prefix in prefixes(text):
            is_booked = self.is_booked(prefix)
            if prefix not in self.resident and not is_booked:
                break
            if prefix in self.open or (is_booked and prefix in coming):
                hit = len(prefix)
        return hit


def prefixes(text: str) -> list[str]:
    return [text[:end] for end in range(1, len(text) + 1)]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_hit_is_that_of_a_search(seed: int) -> None:
    model = Model(seed)
    for now_s in range(120):
        text, events = model.chance.choice(model.texts), (model.store, model.evict, model.book)
        event = model.chance.randrange(5)
        if event < len(events):
            events[event](text)
        elif event == len(events) and model.booked:
            model.end()
        else:
            model.report(text, now_s)
        check(model.residency)
        for one in model.texts:
            assert held(model.tree, model.residency, one) == model.hit(one)
            most = model.chance.randrange(len(one) + 1)
            assert model.ends.hit(model.tree.match(hashes(one)), BLOCK * most + 1).tokens <= BLOCK * most


def test_places_of_ends_that_are_gone_are_forgotten() -> None:
    _, residency, ends = engine()
    for number in range(9_000):
        block = chain([number], 1, 0)
        residency.resident.store(None, block)
        ends.apply([(block[-1], 1)], (), (), residency.resident.finder())
        residency.resident.remove(block[-1])
    assert len(ends._places) < 8_200
