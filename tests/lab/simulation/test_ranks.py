"""Servers of data-parallel ranks in virtual time: placed by rank, or balanced by their servers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.gateway.fleet.router import Router
from plait.lab.embedded.engine import Engine, EngineSettings, Step
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.lockstep import Lockstep
from plait.lab.embedded.ranks import Ranks
from plait.lab.simulation.compare import Experiment, after_warm_up, prepare, simulate, summarise
from plait.lab.simulation.simulate import CallRecord, Prompt, SimulatedCall, Simulation
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.prefix.block_hash import root_hash

# 10 ms an iteration and 1 ms a new token; attention is free.
COST = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
RANKS = 3
Asked = tuple[float, int, int, int]
"""When it arrives, the number of its shared prefix, the tokens of its own, and of its output."""
asked = st.lists(
    st.tuples(st.floats(0, 3), st.integers(0, 2), st.integers(1, 400), st.integers(1, 6)), min_size=1, max_size=15
)


@dataclass(eq=False)
class Stepped(Lockstep):
    """Notes each begin with the ends of the ranks that compute then."""

    ranks: list[Engine]
    ends: list[set[float | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.ranks)

    def step(self, now_s: float) -> Step:
        step = super().step(now_s)
        self.ends.append({engine.step(now_s).ends_s for engine in self.ranks if not engine.idle})
        return step


def prompt(tokens: list[int]) -> Prompt:
    return Prompt(len(tokens), HashChain(16, root_hash("m"), tokens), HashChain(64, root_hash("m"), tokens))


def calls_of(asked: list[Asked]) -> list[SimulatedCall]:
    """Own tokens are unique, so that a call's computed tokens tell where it was computed."""
    return [
        SimulatedCall(at_s, prompt([prefix] * 128 + [1_000 * (1 + number)] * own), output)
        for number, (at_s, prefix, own, output) in enumerate(sorted(asked))
    ]


def engine(name: str) -> Engine:
    return Engine(EngineSettings(name=name, model="m", kv_tokens=16_000), COST)


def run(asked: list[Asked], *, balanced: bool, lockstep: bool) -> tuple[list[CallRecord], list[Engine], Stepped]:
    ranks = {f"engine@{rank}": engine(f"engine@{rank}") for rank in range(RANKS)}
    known: dict[str, Engine | Ranks] = {**ranks}
    if balanced:
        known = {"engine": Ranks([*ranks.values()])}
    router = Router("round_robin" if balanced else "plait")
    for name in known:
        router.add_engine(name, COST, kv_tokens=16_000)
    together = Stepped([*ranks.values()])
    simulation = Simulation(router, known, "m", lockstep=[together] if lockstep else [])
    records = simulation.run(calls_of(asked))
    return records, [*ranks.values()], together


@settings(max_examples=30)
@given(asked=asked, balanced=st.booleans(), lockstep=st.booleans())
def test_each_call_is_computed_by_one_rank(asked: list[Asked], balanced: bool, lockstep: bool) -> None:
    records, ranks, together = run(asked, balanced=balanced, lockstep=lockstep)
    assert sum(rank.counters.calls for rank in ranks) == len(records) == len(asked)
    assert sum(rank.counters.prompt_tokens for rank in ranks) == sum(record.prompt_tokens for record in records)
    assert sum(rank.counters.output_tokens for rank in ranks) == sum(record.output_tokens for record in records)
    assert all(record.arrived_s <= record.admitted_s <= record.first_token_s for record in records)
    if not balanced:
        for rank in ranks:
            own = [record for record in records if record.engine_id == rank.settings.name]
            assert (rank.counters.calls, rank.counters.prompt_tokens) == (
                len(own),
                sum(record.prompt_tokens for record in own),
            )
    assert all(len(ends) <= 1 for ends in together.ends), "in lockstep, iterations end together"
    assert bool(together.ends) == lockstep


@settings(max_examples=20)
@given(asked=asked)
def test_a_server_of_one_rank_is_an_engine(asked: list[Asked]) -> None:
    """Calls are sent as they come: a server that balances reports no cache, by which the gateway holds them."""
    runs = []
    for in_lockstep, is_balanced in ((False, False), (True, False), (False, True)):
        only = engine("engine")
        router = Router("round_robin")
        router.add_engine("engine", COST, kv_tokens=16_000)
        known: dict[str, Engine | Ranks] = {"engine": Ranks([only]) if is_balanced else only}
        lockstep = [Lockstep([only])] if in_lockstep else []
        records = Simulation(router, known, "m", lockstep=lockstep, ahead_s=inf).run(calls_of(asked))
        runs.append([replace(record, predicted_cached_tokens=0, reason="") for record in records])
    assert runs[0] == runs[1] == runs[2]


def test_a_siblings_prompt_delays_a_decode_in_lockstep() -> None:
    short = SimulatedCall(0.0, prompt([1] * 10), 3)
    long = SimulatedCall(0.001, prompt([2] * 1_000), 1)
    times = []
    for lockstep in (False, True):
        ranks = {name: engine(name) for name in ("e@0", "e@1")}
        router = Router("round_robin")
        for name in ranks:
            router.add_engine(name, COST)
        together = [Lockstep([*ranks.values()])] if lockstep else []
        times.append([record.e2e_s for record in Simulation(router, ranks, "m", lockstep=together).run([short, long])])
    # 10 + 10 ms, then two tokens of 11 ms. In lockstep the first of them waits for 1,000 tokens beside it.
    assert times[0] == pytest.approx([0.042, 1.010])
    assert times[1] == pytest.approx([0.020 + 1.010 + 0.011, 0.019 + 1.010])


@pytest.mark.parametrize("lockstep", [False, True])
def test_placement_by_rank_is_faster_than_a_server_that_balances(lockstep: bool) -> None:
    experiment = Experiment(calls=240, engines=1, ranks=4, lockstep=lockstep, kinds=("tools",), working_set=2.0)
    workload = prepare(experiment, lambda *_: None)
    own = replace(experiment, balanced=True, admission=False)
    ours_s, own_s = (
        summarise(policy, after_warm_up(simulate(one, workload, policy, 12.0, lambda *_: None))).e2e_mean_s
        for one, policy in ((experiment, "plait"), (own, "least_outstanding"))
    )
    assert ours_s < 0.75 * own_s
