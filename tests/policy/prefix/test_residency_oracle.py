"""Residency and the tree under it against brute force: sets of resident prefixes, lists of booked and sharing calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from plait.backends.adapter.cache_journal import CacheJournal
from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import Holding, Node, PrefixTree
from plait.policy.prefix.residency import Residency
from tests.examples import examples
from tests.invariants import check
from tests.policy.prefix.block_index import block_index

Prefix = tuple[int, ...]
ENGINES = ("a", "b", "c")
PREFIXES = st.lists(st.sampled_from((0, 0, 0, 1)), min_size=1, max_size=7).map(tuple)  # nearly all is shared


def hashes(prefix: Sequence[int]) -> array[int]:
    return chain(list(prefix), 1, 0)


def name(prefix: Prefix) -> int:
    """The hash that stands for the whole prefix."""
    return hashes(prefix)[-1]


def prefixes(prefix: Prefix) -> set[Prefix]:
    """All of its beginnings, itself included."""
    return {prefix[:end] for end in range(1, len(prefix) + 1)}


@dataclass(eq=False)
class Booked:
    """A call somewhere between booking and leaving the window."""

    engine: str
    prefix: Prefix
    leaf: Node
    booked: bool = True
    shared: bool = True
    waits: bool = False


@dataclass
class Oracle:
    """One engine as a plain set of resident prefixes, and when each was last used."""

    resident: set[Prefix] = field(default_factory=set)
    used: dict[Prefix, int] = field(default_factory=dict)


class Fleet(RuleBasedStateMachine):
    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.residency = {engine: Residency(engine, self.tree) for engine in ENGINES}
        self.oracle = {engine: Oracle() for engine in ENGINES}
        self.live: list[Booked] = []
        self.now = 0

    def use(self, engine: str, used: set[Prefix]) -> None:
        self.now += 1
        self.oracle[engine].used.update(dict.fromkeys(used, self.now))

    def booked(self, engine: str, *, only_sent: bool = False) -> set[Prefix]:
        calls = [call for call in self.live if call.booked and call.engine == engine]
        return {p for call in calls if not (only_sent and call.waits) for p in prefixes(call.prefix)}

    def ready_blocks(self, engine: str, prefix: Prefix) -> int:
        ready = self.oracle[engine].resident | self.booked(engine, only_sent=True)
        return next((end - 1 for end in range(1, len(prefix) + 1) if prefix[:end] not in ready), len(prefix))

    def expected_victims(self, engine: str, blocks: int) -> set[Prefix]:
        """The least lately used first; of those used together, the deepest first."""
        oracle = self.oracle[engine]
        evictable = oracle.resident - self.booked(engine)
        return set(sorted(evictable, key=lambda prefix: (oracle.used[prefix], -len(prefix)))[:blocks])

    @rule(target=calls, engine=st.sampled_from(ENGINES), prefix=PREFIXES, waits=st.booleans())
    def book(self, engine: str, prefix: Prefix, waits: bool) -> Booked:
        leaf = self.tree.insert(hashes(prefix))
        self.residency[engine].book(leaf, waits=waits)
        self.live.append(call := Booked(engine, prefix, leaf, waits=waits))
        self.use(engine, prefixes(prefix))
        return call

    @rule(target=calls, engine=st.sampled_from(ENGINES), prefix=PREFIXES)
    def join(self, engine: str, prefix: Prefix) -> Booked:
        ready, leaf = self.ready_blocks(engine, prefix), self.tree.insert(hashes(prefix))
        assert self.residency[engine].join(leaf) == ready
        self.live.append(call := Booked(engine, prefix, leaf, shared=False))
        self.use(engine, prefixes(prefix))
        return call

    @rule(call=calls)
    def send(self, call: Booked) -> None:
        if call.booked and call.waits:
            call.waits = False
            self.residency[call.engine].send(call.leaf)

    @rule(call=calls, first_unshare=st.booleans())
    def unbook_or_unshare(self, call: Booked, first_unshare: bool) -> None:
        if call.shared and (first_unshare or not call.booked):
            call.shared = False
            self.residency[call.engine].unshare(call.leaf)
        elif call.booked:
            call.booked = False
            self.residency[call.engine].unbook(call.leaf, waits=call.waits)
        if not (call.booked or call.shared) and call in self.live:
            self.live.remove(call)

    @rule(call=consumes(calls))
    def take_back(self, call: Booked) -> None:
        if call.shared:
            self.residency[call.engine].unshare(call.leaf)
        if call.booked:
            self.residency[call.engine].unbook(call.leaf, waits=call.waits)
        call.booked = call.shared = False
        if call in self.live:
            self.live.remove(call)

    @rule(call=calls)
    def touch(self, call: Booked) -> None:
        if call in self.live:
            self.residency[call.engine].touch(call.leaf)
            self.use(call.engine, prefixes(call.prefix))

    @rule(call=calls)
    def store_path(self, call: Booked) -> None:
        if call in self.live:
            self.residency[call.engine].assume_stored(call.leaf, is_booked=False)
            self.oracle[call.engine].resident |= prefixes(call.prefix)
            self.use(call.engine, prefixes(call.prefix))

    @rule(engine=st.sampled_from(ENGINES), prefix=PREFIXES, parent_blocks=st.integers(0, 6))
    def store(self, engine: str, prefix: Prefix, parent_blocks: int) -> None:
        parent, run = prefix[:parent_blocks], hashes(prefix)[parent_blocks:]
        if not run:
            return
        self.residency[engine].resident.store(name(parent) if parent else None, list(run))
        if not parent or parent in self.oracle[engine].resident:
            self.oracle[engine].resident |= prefixes(prefix)
            # A node is used as a whole: what lies behind the run in its last node counts as used with it.
            whole = set(block_index(self.tree)[name(prefix)].hashes)
            self.use(engine, prefixes(prefix) | {p for p in self.oracle[engine].resident if name(p) in whole})

    @rule(engine=st.sampled_from(ENGINES), prefix=PREFIXES)
    def store_then_report_again(self, engine: str, prefix: Prefix) -> None:
        self.store(engine, prefix, 0)
        self.store(engine, prefix, len(prefix) // 2)

    @rule(engine=st.sampled_from(ENGINES), block=PREFIXES)
    def remove(self, engine: str, block: Prefix) -> None:
        self.residency[engine].resident.remove(name(block))
        oracle = self.oracle[engine]
        if block in oracle.resident:
            oracle.resident = {prefix for prefix in oracle.resident if prefix[: len(block)] != block}

    @rule(engine=st.sampled_from(ENGINES))
    def clear(self, engine: str) -> None:
        self.residency[engine].resident.clear()
        self.oracle[engine].resident.clear()

    @rule(engine=st.sampled_from(ENGINES), blocks=st.integers(-1, 12))
    def evict(self, engine: str, blocks: int) -> None:
        victims = self.expected_victims(engine, max(0, blocks))
        self.residency[engine].evict(blocks)
        self.oracle[engine].resident -= victims

    @rule(engine=st.sampled_from(ENGINES), blocks=st.integers(0, 12), query=PREFIXES)
    def victims(self, engine: str, blocks: int, query: Prefix) -> None:
        own = [segment.node for segment in self.tree.match(hashes(query))]
        kept = {block for node in own for block in node.hashes}
        oracle = self.oracle[engine]
        oracle_victims = [p for p in self.expected_victims(engine, len(oracle.resident)) if name(p) not in kept]
        oracle_victims.sort(key=lambda prefix: (oracle.used[prefix], -len(prefix)))
        found: list[int] = []
        for node, taken in self.residency[engine].victims(blocks, own):
            resident = node.holdings[engine].resident_blocks
            assert 0 < taken <= resident
            found += reversed(node.hashes[resident - taken : resident])
        assert found == [name(prefix) for prefix in oracle_victims[:blocks]]

    @rule(engine=st.sampled_from(ENGINES), blocks=st.integers(1, 12), block=PREFIXES)
    def remove_while_evictions_are_expected(self, engine: str, blocks: int, block: Prefix) -> None:
        """The tree is tidied while evictions are expected. Nothing is left of the expectation when it ends."""
        expected = self.residency[engine].expect_eviction(blocks)
        self.tree.tidy()
        self.structures_are_sound()
        self.remove(engine, block)
        self.tree.tidy()
        self.residency[engine].end_expectation(expected)
        nodes = set(self.tree.nodes())
        assert not any(node.holdings[engine].leaving_blocks for node in nodes if engine in node.holdings)

    @rule()
    def tidy(self) -> None:
        self.tree.tidy()

    @rule(query=PREFIXES)
    def match(self, query: Prefix) -> None:
        path = self.tree.match(hashes(query))
        known = {block for block in hashes(query) if block in block_index(self.tree)}
        assert sum(segment.blocks for segment in path) == len(known)
        for engine in ENGINES:
            held = self.oracle[engine].resident | self.booked(engine)
            run = next((end - 1 for end in range(1, len(query) + 1) if query[:end] not in held), len(query))
            assert self.residency[engine].cached_blocks(path) == run

    @invariant()
    def tree_holds_exactly_what_someone_holds_or_shares(self) -> None:
        needed = {p for call in self.live for p in prefixes(call.prefix)}
        for oracle in self.oracle.values():
            needed |= oracle.resident
        assert set(block_index(self.tree)) == {name(prefix) for prefix in needed}

    @invariant()
    def every_block_is_known_to_be_where_it_is(self) -> None:
        nodes = set(self.tree.nodes())
        for engine in ENGINES:
            holdings = {node: node.holdings[engine] for node in nodes if engine in node.holdings}
            resident = {block for node, h in holdings.items() for block in node.hashes[: h.resident_blocks]}
            assert resident == {name(prefix) for prefix in self.oracle[engine].resident}
            assert self.residency[engine].resident.blocks == len(resident)
            mine = [call for call in self.live if call.engine == engine]
            for node in nodes:
                through = [call for call in mine if node in list(call.leaf.path())]
                holding = holdings.get(node, Holding(node, engine))
                assert holding.bookings == sum(call.booked for call in through)
                assert holding.sharers == sum(call.shared for call in through)
                assert holding.waiting == sum(call.booked and call.waits for call in through)

    @invariant()
    def a_waiting_call_counts_on_what_is_there_and_on_what_was_sent(self) -> None:
        for call in self.live:
            if call.booked:
                ready = self.ready_blocks(call.engine, call.prefix)
                assert self.residency[call.engine].ready_blocks(call.leaf) == ready

    @invariant()
    def structures_are_sound(self) -> None:
        check(self.tree)
        for residency in self.residency.values():
            check(residency)


Fleet.TestCase.settings = settings(deadline=None, max_examples=examples(120), stateful_step_count=40)
TestFleet = Fleet.TestCase


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ENGINES), PREFIXES, st.booleans()), max_size=8), st.booleans(), st.randoms())
def test_a_tidied_tree_has_the_nodes_that_it_would_have_without_the_ended_calls(
    calls: list[tuple[str, Prefix, bool]], waits: bool, dice: Random
) -> None:
    tree, fresh = PrefixTree(), PrefixTree()
    residency = {engine: Residency(engine, tree) for engine in ENGINES}
    booked = [(engine, prefix, stays, tree.insert(hashes(prefix))) for engine, prefix, stays in calls]
    for engine, _, _, leaf in booked:
        residency[engine].book(leaf, waits=waits)
    for engine, _, stays, leaf in dice.sample(booked, len(booked)):
        if not stays:
            residency[engine].unbook(leaf, waits=waits)
            residency[engine].unshare(leaf)
    for engine, prefix, stays, leaf in booked:
        if stays:
            residency[engine].touch(leaf)
            fresh.insert(hashes(prefix))
    tree.tidy()
    check(tree)
    for one in residency.values():
        check(one)
    assert {tuple(node.hashes) for node in tree.nodes()} == {tuple(node.hashes) for node in fresh.nodes()}
    assert all(block_index(tree)[name(prefix)] is leaf for _, prefix, stays, leaf in booked if stays)


@settings(deadline=None)
@given(st.data())
def test_polling_an_engines_journal_gives_exactly_what_it_stores(data: st.DataObject) -> None:
    """Snapshot into a cold tree, then deltas; the engine evicts leaves first, in any order among them."""
    journal, tree = CacheJournal(max_tombstones=4), PrefixTree()
    residency = Residency("a", tree)
    stored: set[Prefix] = set()
    cursor: int | None = None
    for _ in range(data.draw(st.integers(1, 12))):
        leaves = sorted(p for p in stored if not any(q[:-1] == p for q in stored))
        evicts = data.draw(st.booleans(), label="evict")
        if leaves and evicts:
            leaf = data.draw(st.sampled_from(leaves))
            stored.remove(leaf)
            journal.remove(name(leaf))
        else:
            prefix = data.draw(PREFIXES)
            for end in range(1, len(prefix) + 1):
                stored.add(prefix[:end])
                journal.store(name(prefix[:end]), name(prefix[: end - 1]) if end > 1 else None)
        if data.draw(st.booleans(), label="poll"):
            snapshot, runs, removed = journal.since(cursor)
            cursor = journal.cursor
            if snapshot:
                residency.resident.clear()
            residency.resident.apply(removed, [(run.parent, run.hashes) for run in runs])
            assert set(block_index(tree)) == {name(prefix) for prefix in stored}
            assert residency.resident.blocks == len(stored)
        check(tree)
        check(residency)
