"""E2 against a second implementation, over plain lists and sets and with no regard for time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.load import LoadLedger
from plait.policy.costs.situation import Situation
from plait.policy.placement.e2 import LoadCost, e2
from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call, PlacementReason
from tests.examples import examples

BLOCK_TOKENS, PRIOR_OUTPUT_TOKENS = 10, 15
COSTS = CostModel(PiecewiseLinear(((0, 0.0),), 1.0), 0.0, 0.0, 0.0, LongAttention())  # a second a token

Prefix = tuple[int, ...]
PREFIXES = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


def prefixes(prompt: Prefix) -> list[Prefix]:
    return [prompt[:end] for end in range(1, len(prompt) + 1)]


@dataclass(frozen=True)
class Past:
    """A call of the window: on its way; ended and stored up to some block; or ended and not stored at all."""

    prompt: Prefix
    missed: int
    output: int
    running: bool
    stored_blocks: int
    evicted_from: int | None


@dataclass
class NaiveEngine:
    """What Algorithms 1 and 2 need to know of an engine, in the plainest form."""

    past: list[Past]
    free: float | None
    outstanding: int
    resident: set[Prefix] = field(default_factory=set)
    used: dict[Prefix, int] = field(default_factory=dict)

    def has(self, prefix: Prefix) -> bool:
        return prefix in self.resident or any(p.running and prefix in prefixes(p.prompt) for p in self.past)

    def matched_blocks(self, prompt: Prefix) -> int:
        return next((n for n, prefix in enumerate(prefixes(prompt)) if not self.has(prefix)), len(prompt))

    def mean_output(self) -> float:
        outputs = [past.output for past in self.past if not past.running]
        return sum(outputs) / len(outputs) if outputs else PRIOR_OUTPUT_TOKENS

    def window_cost(self) -> float:
        return sum(past.missed + self.mean_output() for past in self.past)


@dataclass
class Naive:
    """Algorithms 1 and 2 over the whole fleet; a node is the run of blocks between two ends of calls or branches."""

    engines: list[NaiveEngine]

    def node_end(self, prefix: Prefix) -> Prefix:
        """The prefix that ends the node in which the last block of `prefix` lies."""
        prompts = [past.prompt for engine in self.engines for past in engine.past]
        while True:
            longer = {p[: len(prefix) + 1] for p in prompts if p[: len(prefix)] == prefix and len(p) > len(prefix)}
            if prefix in prompts or len(longer) != 1:
                return prefix
            prefix = longer.pop()

    def known(self, prompt: Prefix) -> list[Prefix]:
        """The prefixes of the prompt that are in the tree."""
        prompts = [past.prompt for engine in self.engines for past in engine.past]
        return [prefix for prefix in prefixes(prompt) if any(p[: len(prefix)] == prefix for p in prompts)]

    def place(self, prompt: Prefix, tokens: int) -> tuple[PlacementReason, dict[int, tuple[float, float, float]]]:
        """The reason, and L, M and P of each candidate."""
        cached = [min(e.matched_blocks(prompt), (tokens - 1) // BLOCK_TOKENS) for e in self.engines]
        candidates: Iterable[int] = range(len(self.engines))
        reason = PlacementReason.EXPLORE
        if max(cached) * BLOCK_TOKENS > tokens - max(cached) * BLOCK_TOKENS:
            reason, candidates = PlacementReason.EXPLOIT, self.holders(prompt, cached)
        return reason, {i: self.load_cost(self.engines[i], prompt, tokens, cached[i]) for i in candidates}

    def holders(self, prompt: Prefix, cached: list[int]) -> list[int]:
        nodes: dict[Prefix, list[int]] = {}
        for depth, prefix in enumerate(self.known(prompt)[: max(cached)]):
            nodes.setdefault(self.node_end(prefix), []).append(depth)
        key = max(nodes.values(), key=lambda depths: (len(depths), depths))
        return [i for i, blocks in enumerate(cached) if sum(depth < blocks for depth in key) >= len(key) / 2]

    def load_cost(self, engine: NaiveEngine, prompt: Prefix, tokens: int, cached: int) -> tuple[float, float, float]:
        missed = tokens - cached * BLOCK_TOKENS
        evicted = 0.0
        if engine.free is not None and engine.past:
            shortage = ceil((missed + engine.mean_output() - engine.free) / BLOCK_TOKENS)
            for end, blocks in self.victims(engine, prompt, max(0, shortage)).items():
                sharers = sum(past.prompt[: len(end)] == end for past in engine.past)
                evicted += blocks * BLOCK_TOKENS * sharers / len(engine.past)
        return engine.window_cost(), evicted, float(missed)

    def victims(self, engine: NaiveEngine, prompt: Prefix, blocks: int) -> dict[Prefix, int]:
        own = {self.node_end(prefix) for prefix in self.known(prompt)}
        in_use = {prefix for past in engine.past if past.running for prefix in prefixes(past.prompt)}
        order = sorted(engine.resident - in_use, key=lambda prefix: (engine.used[prefix], -len(prefix)))
        taken: dict[Prefix, int] = {}
        for prefix in [prefix for prefix in order if self.node_end(prefix) not in own][:blocks]:
            taken[self.node_end(prefix)] = taken.get(self.node_end(prefix), 0) + 1
        return taken


@st.composite
def pasts(draw: st.DrawFn) -> Past:
    prompt = draw(PREFIXES)
    return Past(
        prompt,
        missed=draw(st.integers(0, 40)),
        output=draw(st.sampled_from((0, 20, 40))),
        running=draw(st.booleans()),
        stored_blocks=draw(st.integers(0, len(prompt))),
        evicted_from=draw(st.none() | st.integers(1, len(prompt))),
    )


ENGINES = st.builds(
    NaiveEngine,
    past=st.lists(pasts(), max_size=5),
    free=st.none() | st.integers(0, 80).map(float),
    outstanding=st.integers(0, 2),
)


def build(name: str, engine: NaiveEngine, tree: PrefixTree) -> EngineView:
    """The real thing, and on the way the naive engine's residency and times of use."""
    ledger, residency = LoadLedger(COSTS, prior_output_tokens=PRIOR_OUTPUT_TOKENS), Residency(name, tree)
    for time, past in enumerate(engine.past):
        hashes = chain(past.prompt, 1, 0)
        leaf = tree.insert(hashes)
        entry = ledger.book(leaf, past.missed, len(past.prompt) * BLOCK_TOKENS, 0.0)
        residency.book(leaf)
        residency.resident.store(None, hashes[: past.stored_blocks])
        residency.touch(leaf)
        if not past.running:
            ledger.settle(entry, past.missed, past.output)
            residency.unbook(leaf)
        engine.resident.update(prefixes(past.prompt)[: past.stored_blocks])
        engine.used.update(dict.fromkeys(prefixes(past.prompt), time))
        if past.evicted_from is not None:
            residency.resident.remove(hashes[past.evicted_from - 1])
            cut = past.prompt[: past.evicted_from]
            engine.resident = {prefix for prefix in engine.resident if prefix[: len(cut)] != cut}
    return EngineView(name, COSTS, ledger, residency, engine.free, engine.outstanding)


@settings(deadline=None, max_examples=examples(400))
@given(engines=st.lists(ENGINES, min_size=1, max_size=4), prompt=PREFIXES, extra_tokens=st.integers(0, 9))
def test_e2_is_algorithms_1_and_2(engines: list[NaiveEngine], prompt: Prefix, extra_tokens: int) -> None:
    tree = PrefixTree()
    views = [build(str(number), engine, tree) for number, engine in enumerate(engines)]
    tokens = len(prompt) * BLOCK_TOKENS + extra_tokens
    call = Call("call", "model", tokens, BLOCK_TOKENS, chain(prompt, 1, 0))

    placement = e2(call, Situation(tree.match(call.block_hashes), views, 0))

    reason, costs = Naive(engines).place(prompt, tokens)
    totals = {number: sum(cost) for number, cost in costs.items()}
    chosen = int(placement.engine_id)
    assert placement.reason == reason
    assert totals[chosen] == pytest.approx(min(totals.values()))
    assert isinstance(placement.cost, LoadCost)
    assert (placement.cost.window_s, placement.cost.eviction_s, placement.cost.prefill_s) == pytest.approx(
        costs[chosen]
    )
    assert placement.missed_tokens == tokens - placement.cached_tokens == costs[chosen][2]
    equal = [number for number, total in totals.items() if total == pytest.approx(totals[chosen])]
    if all(costs[number] == costs[chosen] for number in equal):
        assert chosen == min(equal, key=lambda number: (engines[number].outstanding, number))
