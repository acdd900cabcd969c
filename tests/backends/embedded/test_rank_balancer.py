"""A server's own balancing over ranks, against vLLM's formula."""

from __future__ import annotations

from plait.backends.embedded.call import EmbeddedCall
from plait.backends.embedded.engine import Engine, EngineSettings
from plait.backends.embedded.rank_balancer import COUNTED_S, RankBalancer
from plait.backends.profiles import load_profile
from plait.policy.prefix.block_hash import HashChain, root_hash


def new_engines(count: int, kv_tokens: int = 100_000) -> list[Engine]:
    settings = EngineSettings(name="e", model="m", kv_tokens=kv_tokens)
    return [Engine(settings, load_profile("a6000-mistral-7b").cost_model()) for _ in range(count)]


def add(engine: Engine, tokens: int = 64, output: int = 100) -> EmbeddedCall:
    chain = HashChain(16, root_hash("m"), range(tokens))
    call = EmbeddedCall("c", 0.0, tokens, chain=chain, tree_chain=chain, final_output_tokens=output)
    engine.add(call)
    return call


def choose(balancer: RankBalancer, engines: list[Engine], now_s: float) -> int:
    rank = balancer.choose(now_s)
    add(engines[rank])
    return rank


def test_ties_go_in_turn() -> None:
    engines = new_engines(3)
    balancer = RankBalancer(engines)
    assert [balancer.choose(float(number)) for number in range(5)] == [0, 1, 2, 0, 1], "no call came to an engine"


def test_a_burst_is_spread() -> None:
    engines = new_engines(4)
    balancer = RankBalancer(engines)
    assert sorted(choose(balancer, engines, 0.0) for _ in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_rank_with_fewer_calls_is_chosen() -> None:
    engines = new_engines(2)
    for _ in range(3):
        add(engines[0])
    engines[0].step(0.0)
    balancer = RankBalancer(engines)
    assert [choose(balancer, engines, 0.0) for _ in range(3)] == [1, 1, 1]


def test_ends_count_only_with_the_next_counts() -> None:
    engines = new_engines(2)
    calls = [add(engines[0]) for _ in range(2)]
    balancer = RankBalancer(engines)
    assert choose(balancer, engines, 0.0) == 1
    for call in calls:
        engines[0].remove(call)
    assert choose(balancer, engines, COUNTED_S / 2) == 1, "counted as 2 against 1"
    assert choose(balancer, engines, COUNTED_S) == 0


def test_waiting_calls_weigh_more_where_the_cache_is_full() -> None:
    engines = new_engines(2, kv_tokens=1_600)
    add(engines[0], tokens=1_440)
    engines[0].step(0.0)
    add(engines[0], tokens=480)
    for _ in range(3):
        add(engines[1], tokens=16)
    engines[1].step(0.0)
    assert RankBalancer(engines).choose(0.0) == 1, "2 + 6 x .4 against 3"
