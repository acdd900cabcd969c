"""A server's own choice among its ranks, against vLLM's formula."""

from __future__ import annotations

from plait.backends.profiles import load_profile
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.ranks import Ranks
from plait.policy.prefix.block_hash import root_hash


def new_ranks(count: int, kv_tokens: int = 100_000) -> Ranks:
    settings = EngineSettings(name="e", model="m", kv_tokens=kv_tokens)
    return Ranks([Engine(settings, load_profile("a6000-mistral-7b").cost_model()) for _ in range(count)])


def add(engine: Engine, tokens: int = 64, output: int = 100) -> EmbeddedCall:
    chain = HashChain(16, root_hash("m"), range(tokens))
    call = EmbeddedCall("c", 0.0, tokens, chain=chain, tree_chain=chain, final_output_tokens=output)
    engine.add(call)
    return call


def chosen(ranks: Ranks, calls: int) -> list[int]:
    """The ranks of so many calls, each of which comes to its engine."""
    found = []
    for _ in range(calls):
        found.append(ranks.choose())
        add(ranks.engines[found[-1]])
    return found


def test_ties_go_in_turn() -> None:
    ranks = new_ranks(3)
    assert [ranks.choose() for _ in range(5)] == [0, 1, 2, 0, 1], "no call came to an engine"


def test_a_burst_is_spread() -> None:
    assert sorted(chosen(new_ranks(4), 8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_rank_with_fewer_calls_is_chosen() -> None:
    ranks = new_ranks(2)
    calls = [add(ranks.engines[0]) for _ in range(3)]
    ranks.engines[0].step(0.0)
    assert chosen(ranks, 3) == [1, 1, 1]
    for call in calls:
        ranks.engines[0].remove(call)
    assert chosen(ranks, 3) == [0, 0, 0]


def test_waiting_calls_weigh_more_where_the_cache_is_full() -> None:
    ranks = new_ranks(2, kv_tokens=1_600)
    first, second = ranks.engines
    add(first, tokens=1_440)
    first.step(0.0)
    add(first, tokens=480)
    for _ in range(3):
        add(second, tokens=16)
    second.step(0.0)
    assert ranks.choose() == 1, "2 + 6 x .4 against 3"
