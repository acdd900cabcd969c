"""Random sequences of everything that can happen to a fleet, against sets: what the router believes is exactly what the
engines reported and what running calls will bring, and when all has ended nothing else is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.errors import NoEngineError
from plait.backends.protocol.cache_state import CacheState, KvState
from plait.gateway.fleet.booking import Booking, BookingState, BookingTransitionError, CallUsage
from plait.gateway.fleet.health import HealthState
from plait.gateway.fleet.router import EngineBusyError, Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.placement.policies import POLICIES, Policy
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.types import Call, Placement, Slo, TaskGroup
from tests.examples import examples
from tests.invariants import check
from tests.policy.prefix.block_index import block_index

Prefix = tuple[int, ...]
COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
PREFIXES = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)  # two kinds of block: nearly all is shared
REPORTING, SILENT = ("a", "b"), "c"
ENGINES = st.sampled_from((*REPORTING, SILENT))
WINDOW_S = 10.0


def hashes(prefix: Prefix) -> list[int]:
    return list(chain(prefix, 1, root_hash("m")))


def name(prefix: Prefix) -> int:
    return hashes(prefix)[-1]


def beginnings(prefix: Prefix) -> set[Prefix]:
    return {prefix[:end] for end in range(1, len(prefix) + 1)}


@dataclass
class FakeEngine:
    """What an engine really stores; `known` is what the router was last told or may assume."""

    journal: CacheJournal = field(default_factory=CacheJournal)
    epoch: int = 0
    stored: set[Prefix] = field(default_factory=set)
    known: set[Prefix] = field(default_factory=set)
    unconfirmed: list[tuple[float, Prefix]] = field(default_factory=list)

    def store(self, prefix: Prefix) -> None:
        for end in range(1, len(prefix) + 1):
            self.stored.add(prefix[:end])
            self.journal.store(name(prefix[:end]), name(prefix[: end - 1]) if end > 1 else None)

    def evict(self, leaf: Prefix) -> None:
        self.stored.remove(leaf)
        self.journal.remove(name(leaf))


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.fakes = {engine: FakeEngine() for engine in (*REPORTING, SILENT)}
        self.running: dict[Booking, Prefix] = {}
        self.ended: list[Booking] = []

    @initialize(policy=st.sampled_from(sorted(POLICIES)), reports_first=st.booleans())
    def start(self, policy: str | Policy, reports_first: bool) -> None:
        self.router = Router(policy, window_s=WINDOW_S)
        for engine in self.fakes:
            self.router.add_engine(engine, COSTS)
            self.router.health.answered(engine, {"m": None})
        if reports_first:
            for engine in REPORTING:
                self.report(engine, 0.0, forget=False)

    @property
    def up(self) -> set[str]:
        return {name for name, engine in self.router.engines.items() if engine.health.state is HealthState.UP}

    @property
    def takers(self) -> set[str]:
        return {name for name in self.up if not self.router.engines[name].draining}

    def call(self, prefix: Prefix) -> Call:
        return Call("c", "m", 64 * len(prefix) + 1, 64, hashes(prefix))

    def expected(self, engine: str, *, only_sent: bool = False) -> set[Prefix]:
        """The oracle: what the router was told of, or that a call it placed there brings."""
        fake = self.fakes[engine]
        coming = [prefix for _, prefix in fake.unconfirmed]
        placed = [booking for booking in self.running if booking.placement.engine_id == engine]
        coming += [
            self.running[booking] for booking in placed if not only_sent or booking.state is not BookingState.WAITING
        ]
        return fake.known.union(*map(beginnings, coming))

    def some(self, which: int, *states: BookingState) -> Booking | None:
        """One of the calls in these states."""
        found = [booking for booking in self.running if booking.state in states]
        return found[which % len(found)] if found else None

    def expects_eviction(self, engine: str) -> bool:
        """Whether something resident is to make room for a call that is on its way: it is no longer counted on."""
        nodes = set(self.router.tree.nodes())
        return any(node.holdings[engine].leaving_blocks for node in nodes if engine in node.holdings)

    # Calls.

    @rule(prefixes=st.lists(PREFIXES, min_size=1, max_size=3), waits=st.booleans())
    def place(self, prefixes: list[Prefix], waits: bool) -> None:
        for prefix in prefixes:
            self.now_s += 0.25
            if not self.takers:
                with pytest.raises(NoEngineError):
                    self.router.select(self.call(prefix), 0.0)
                return
            before = state(self.router)
            placement = self.router.select(self.call(prefix), 0.0)
            assert state(self.router) == before, "selecting has no side effects"
            assert placement.engine_id in self.takers
            self.counts_on(placement, prefix, self.expected(placement.engine_id))
            self.running[self.router.book(self.call(prefix), placement, self.now_s, waits=waits)] = prefix

    def counts_on(self, placement: Placement, prefix: Prefix, held: set[Prefix]) -> None:
        """The engine is expected to hold as much of the prefix as it does, less what it may evict."""
        run = next((end - 1 for end in range(1, len(prefix) + 1) if prefix[:end] not in held), len(prefix))
        assert placement.cached_tokens <= 64 * run
        if not self.expects_eviction(placement.engine_id):
            assert placement.cached_tokens == 64 * run
        assert placement.cached_tokens + placement.missed_tokens == 64 * len(prefix) + 1

    @rule(which=st.integers(0, 99))
    def send(self, which: int) -> None:
        """A call that has waited finds what is there by then, and what the calls sent before it bring."""
        if (booking := self.some(which, BookingState.WAITING)) is not None:
            ready = self.expected(booking.placement.engine_id, only_sent=True)
            self.router.send(booking, self.now_s)
            assert (booking.state, booking.sent_s) == (BookingState.SENT, self.now_s)
            if self.now_s > booking.booked_s:
                self.counts_on(booking.placement, self.running[booking], ready)

    @precondition(lambda self: self.takers)
    @rule(prefix=PREFIXES, waits=st.booleans())
    def fail_to_deliver(self, prefix: Prefix, waits: bool) -> None:
        before = state(self.router)
        placement = self.router.select(self.call(prefix), self.now_s)
        booking = self.router.book(self.call(prefix), placement, self.now_s, waits=waits)
        self.router.release(booking, self.now_s, delivered=False)
        assert state(self.router) == before, "a call that was not delivered leaves no trace"
        self.ended.append(booking)

    @rule(which=st.integers(0, 99))
    def first_token(self, which: int) -> None:
        if (booking := self.some(which, BookingState.SENT)) is not None:
            self.router.first_token(booking, self.now_s)

    @rule(which=st.integers(0, 99))
    def answer_what_was_not_sent(self, which: int) -> None:
        if (booking := self.some(which, BookingState.WAITING)) is not None:
            before = state(self.router)
            with pytest.raises(BookingTransitionError):
                self.router.first_token(booking, self.now_s)
            with pytest.raises(BookingTransitionError):
                self.router.settle(booking, CallUsage(1, 1), self.now_s)
            assert (state(self.router), booking.state) == (before, BookingState.WAITING)

    @precondition(lambda self: self.running)
    @rule(
        which=st.integers(0, 99),
        slo=st.sampled_from((None, Slo(ttft_s=1.0), Slo(jct_s=9.0))),
        group=st.sampled_from((None, TaskGroup("g", 2), TaskGroup("h", 5))),
    )
    def refine(self, which: int, slo: Slo | None, group: TaskGroup | None) -> None:
        booking = list(self.running)[which % len(self.running)]
        call = booking.call._replace(slo=slo, group=group)
        self.router.refine(booking, call, self.now_s)
        assert booking.call is call

    @rule(which=st.integers(0, 99), cached=st.none() | st.integers(0, 300), stores=st.integers(1, 6))
    def settle(self, which: int, cached: int | None, stores: int) -> None:
        if (booking := self.some(which, BookingState.SENT, BookingState.STREAMING)) is not None:
            self.router.settle(booking, CallUsage(booking.call.prompt_tokens, 3, cached), self.now_s)
            self.end(booking, stores)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), delivered=st.booleans(), stores=st.integers(0, 6))
    def release(self, which: int, delivered: bool, stores: int) -> None:
        booking = list(self.running)[which % len(self.running)]
        delivered = delivered and booking.state is not BookingState.WAITING
        self.router.release(booking, self.now_s, delivered=delivered)
        if delivered:
            self.end(booking, stores)
        else:
            del self.running[booking]

    @rule(which=st.integers(0, 99))
    def refuse(self, which: int) -> None:
        if (booking := self.some(which, BookingState.SENT, BookingState.STREAMING)) is not None:
            self.router.release(booking, self.now_s, delivered=False, refused=True)
            del self.running[booking]

    def end(self, booking: Booking, stores: int) -> None:
        prefix, engine = self.running.pop(booking), booking.placement.engine_id
        fake = self.fakes[engine]
        fake.store(prefix[:stores])
        if self.router.engines[engine].cache.reports:
            fake.unconfirmed.append((self.now_s, prefix))
        else:
            fake.known |= beginnings(prefix)
        self.ended.append(booking)

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 99))
    def end_again(self, which: int) -> None:
        booking = self.ended[which % len(self.ended)]
        before = state(self.router), booking.state, booking.first_token_s
        with pytest.raises(BookingTransitionError):
            self.router.first_token(booking, self.now_s)
        with pytest.raises(BookingTransitionError):
            self.router.settle(booking, CallUsage(1, 1), self.now_s)
        with pytest.raises(BookingTransitionError):
            self.router.release(booking, self.now_s, delivered=False)
        with pytest.raises(BookingTransitionError):
            self.router.send(booking, self.now_s)
        assert (state(self.router), booking.state, booking.first_token_s) == before

    # Engines.

    @rule(engine=st.sampled_from(REPORTING), asked_before_s=st.sampled_from((0.0, 0.0, 0.3, 1.0)), forget=st.booleans())
    def report(self, engine: str, asked_before_s: float, forget: bool) -> None:
        fake, known, requested_s = self.fakes[engine], self.router.engines[engine], self.now_s - asked_before_s
        same = known.cache.epoch == str(fake.epoch) and not forget
        snapshot, stored, removed = fake.journal.since(known.cache.cursor if same else None)
        report = CacheState(
        kind="embedded",
            engine=engine, epoch=str(fake.epoch), cursor=fake.journal.cursor, model="m", block_tokens=16,
            granularity_tokens=64, snapshot=snapshot, stored=stored, removed=removed, kv=KvState(100, 40, 10),
        )  # fmt: skip
        self.router.report(engine, report, requested_s)
        fake.known = set(fake.stored)
        fake.unconfirmed = [(ended_s, prefix) for ended_s, prefix in fake.unconfirmed if ended_s > requested_s]
        assert known.view.free_tokens == 640

    @precondition(lambda self: any(self.fakes[engine].stored for engine in REPORTING))
    @rule(which=st.lists(st.integers(0, 99), min_size=1, max_size=3))
    def evict(self, which: list[int]) -> None:
        for engine in REPORTING:
            for number in which:
                stored = self.fakes[engine].stored
                if leaves := sorted(p for p in stored if not any(q[:-1] == p for q in stored)):
                    self.fakes[engine].evict(leaves[number % len(leaves)])

    @rule(engine=ENGINES, event=st.sampled_from(("answers", "answers", "answers", "fails", "restarts", "says no more")))
    def change(self, engine: str, event: str) -> None:
        fake, was_up = self.fakes[engine], engine in self.up
        if event == "answers":
            assert (self.router.health.answered(engine, {"m": None}) is None) == was_up
            assert engine in self.up
        elif event == "fails":
            assert (self.router.health.unreachable(engine) != []) == was_up
            assert engine not in self.up
        elif event == "restarts":
            fake.journal, fake.epoch, fake.stored = CacheJournal(), fake.epoch + 1, set()
        else:
            self.router.no_reports(engine)
            fake.known = fake.known.union(*(beginnings(prefix) for _, prefix in fake.unconfirmed))
            fake.unconfirmed = []

    @rule(engine=ENGINES, draining=st.booleans())
    def drain(self, engine: str, draining: bool) -> None:
        self.router.health.drain(engine, draining=draining)

    @rule(engine=ENGINES)
    def remove_and_add(self, engine: str) -> None:
        before = state(self.router)
        is_busy = any(booking.placement.engine_id == engine for booking in self.running)
        if is_busy or not self.router.engines[engine].draining:
            with pytest.raises(EngineBusyError):
                self.router.remove_engine(engine)
            assert state(self.router) == before
            return
        self.router.remove_engine(engine)
        for part in before.values():
            del part[engine]
        assert state(self.router) == before, "the books of the others are as they were"
        assert blocks(self.router, engine) == {}
        check(self.router)
        needed = set[int]().union(*(blocks(self.router, other) for other in self.router.engines))
        assert set(block_index(self.router.tree)) == needed, "the tree has nothing that was there for this engine alone"
        self.ended = [booking for booking in self.ended if booking.placement.engine_id != engine]
        self.fakes[engine] = FakeEngine()
        self.router.add_engine(engine, COSTS)
        self.router.health.answered(engine, {"m": None})

    @rule(passed_s=st.sampled_from((0.0, 1.0, 6.0)))
    def age(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.router.age(self.now_s)

    @invariant()
    def state_is_sound(self) -> None:
        check(self.router)
        for engine_id, engine in self.router.engines.items():
            mine = [booking for booking in self.running if booking.placement.engine_id == engine_id]
            assert engine.view.outstanding == len(mine)
            assert engine.view.queue.unsent == sum(booking.state is BookingState.WAITING for booking in mine)
            known = self.fakes[engine_id].known
            assert engine.view.residency.resident.blocks == len(known)
            believed = {block for block, held in blocks(self.router, engine_id).items() if held[0] or held[1]}
            assert believed == {name(prefix) for prefix in self.expected(engine_id)}

    def teardown(self) -> None:
        """All calls end, all engines report, the window passes."""
        if not hasattr(self, "router"):
            return
        for number, booking in enumerate(list(self.running)):
            if booking.state is BookingState.WAITING:
                self.router.send(booking, self.now_s)
            if number % 2:
                self.router.settle(booking, CallUsage(1, 1), self.now_s)
            else:
                self.router.release(booking, self.now_s, delivered=True)
            self.end(booking, stores=number % 4)
        self.now_s += WINDOW_S + 1
        self.router.age(self.now_s)
        for engine in REPORTING:
            self.report(engine, 0.0, forget=False)
        self.state_is_sound()
        assert set(block_index(self.router.tree)) == {name(p) for fake in self.fakes.values() for p in fake.known}
        for known in self.router.engines.values():
            assert (known.view.outstanding, len(known.view.ledger), list(known.cache.unconfirmed)) == (0, 0, [])
            assert known.view.ledger.window_cost_s() == 0.0
        for node in self.router.tree.nodes():
            assert all(h.bookings == h.sharers == h.waiting == 0 < h.resident_blocks for h in node.holdings.values())


def blocks(router: Router, engine: str) -> dict[int, tuple[bool, int, int, int]]:
    """Of every block that the engine has to do with: whether it is resident, its bookings, sharers and who waits."""
    found = {}
    for node in router.tree.nodes():
        if (held := node.holdings.get(engine)) is not None:
            for place, block in enumerate(node.hashes):
                found[block] = (place < held.resident_blocks, held.bookings, held.sharers, held.waiting)
    return {block: held for block, held in found.items() if any(held)}


def state(router: Router) -> dict[str, Any]:
    """Everything that decisions depend on, but for whose turn it is and what was used last."""
    return {
        "blocks": {engine: blocks(router, engine) for engine in router.engines},
        "engines": {
            engine_id: (
                engine.view.outstanding,
                engine.view.queue.tokens,
                engine.view.queue.unsent,
                engine.view.free_tokens,
                len(engine.view.ledger),
                round(engine.view.ledger.window_cost_s(), 9),
                engine.view.residency.resident.blocks,
                list(engine.cache.unconfirmed),
                engine.health.state,
                engine.cache.reports,
            )
            for engine_id, engine in router.engines.items()
        },
    }


Fleet.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60)
TestFleet = Fleet.TestCase
