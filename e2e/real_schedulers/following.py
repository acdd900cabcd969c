"""A follower of an engine's reports, and its comparison with the engine's own cache."""

from __future__ import annotations

import random

from e2e.real_schedulers.built_engine import BuiltEngine
from plait.backends.protocol.cache_state import CacheState, HitEnds, LowerTier, OutstandingCall


class Follower:
    """Knows what the reports say, as a `gateway` does: `known` has the tree blocks with their parents.

    `below` has those of the tiers below the accelerator. `ends` are those after which a hit can end, and `inside` the
    names of the ends inside blocks, of an engine that tells them. `calls` are the other gateways' by number.
    """

    def __init__(self, engine: BuiltEngine, gateway: str | None = None) -> None:
        self.known: dict[int, int | None] = {}
        self.below: dict[str, dict[int, int | None]] = {}
        self.ends: set[int] = set()
        self.inside: set[int] = set()
        self.calls: dict[int, OutstandingCall] = {}
        self._gateway = gateway
        self._engine = engine
        self._cursor: int | None = None
        self._epoch: str | None = None

    def follow(self) -> CacheState:
        """Take the next report."""
        state = self._engine.report(self._cursor, self._epoch, self._gateway)
        if state.snapshot:
            self.known.clear()
            self.below.clear()
            self.ends.clear()
            self.inside.clear()
            self.calls.clear()
        for number in state.ended:
            self.calls.pop(number, None)
        self.calls.update((call.number, call) for call in state.calls or ())
        _apply(self.known, state)
        for tier in state.tiers:
            _apply(self.below.setdefault(tier.tier, {}), tier)
        if state.ends is not None:
            self._take_ends(state.ends)
        state.check()
        self._cursor, self._epoch = state.cursor, state.epoch
        return state

    def _take_ends(self, told: HitEnds) -> None:
        self.inside.difference_update(told.closed)
        self.inside.update(name for _, _, name in told.inside)
        self.ends = self.ends.difference(told.closed) & self.known.keys()
        for last, blocks in told.opened:
            block: int | None = last
            for _ in range(blocks):
                assert block is not None
                self.ends.add(block)
                block = self.known[block]

    def check(self) -> None:
        """Compare the next report with the engine's own cache."""
        state = self.follow()
        assert self.known == self._engine.held()
        assert self.below == self._engine.held_below()
        kv = state.kv
        assert (kv.total_blocks, kv.free_blocks, kv.cached_blocks) == self._engine.pages()


def _apply(known: dict[int, int | None], changes: CacheState | LowerTier) -> None:
    for gone in changes.removed:
        known.pop(gone, None)
    for run in changes.stored:
        known.update(zip(run.hashes, [run.parent, *run.hashes], strict=False))


def follow_a_workload(engine: BuiltEngine, seed: int) -> None:
    """Check the reports through arrivals, aborts, ends and evictions."""
    dice, follower = random.Random(seed), Follower(engine)
    shared = [[dice.randrange(1000) for _ in range(dice.randrange(400))] for _ in range(3)]
    names: list[str] = []
    ever: set[int] = set()
    for _ in range(120):
        for _ in range(dice.choice((0, 0, 1, 2))):
            own = [dice.randrange(1000) for _ in range(dice.randrange(1, 150))]
            prefix = dice.choice(shared)[: dice.randrange(400)]
            names.append(engine.add([*prefix, *own], dice.randrange(1, 250)))
        if names and dice.random() < 0.15:
            engine.abort(dice.choice(names))
        engine.step()
        if dice.random() < 0.5:
            follower.check()
            ever |= follower.known.keys()
    engine.run()
    follower.check()
    assert len(ever | follower.known.keys()) > len(follower.known), "blocks were evicted"
