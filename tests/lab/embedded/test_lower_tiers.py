"""The embedded engine with tiers below its accelerator: what is where, what is computed, and what loads take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.lower_tiers import TierSettings
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.costs.tier_link import LinkQueue, TierLink
from plait.policy.prefix.block_hash import root_hash
from tests.invariants import check

ROOT = root_hash("m")
COSTS = CostModel(PiecewiseLinear(((1, 0.01),), 1e-4), 0.0, 1e-6, 0.0, LongAttention())
HOST, DISK = TierLink("host", 1e-6, 0.001), TierLink("disk", 5e-6, 0.002)


def new_engine(kv_tokens: int, *lower: tuple[TierLink, int], scheduler: str = "slo", block_tokens: int = 16) -> Engine:
    tiers = tuple(TierSettings(link, tokens) for link, tokens in lower)
    sizes = {"kv_tokens": kv_tokens, "block_tokens": block_tokens}
    return Engine(EngineSettings(name="e", model="m", scheduler=scheduler, lower=tiers, **sizes), COSTS)


def new_call(tokens: Sequence[int], output: int, now_s: float = 0.0, block_tokens: int = 16) -> EmbeddedCall:
    prompt = HashChain(block_tokens, ROOT, tokens)
    tree = HashChain(64, ROOT, tokens)
    return EmbeddedCall("c", now_s, len(tokens), chain=prompt, tree_chain=tree, final_output_tokens=output)


def run(engine: Engine, call: EmbeddedCall, now_s: float = 0.0) -> float:
    """When the call's last token has come."""
    engine.add(call)
    return go_on(engine, now_s)


def go_on(engine: Engine, now_s: float) -> float:
    """When nothing is left to do."""
    while (ends_s := engine.step(now_s).ends_s) is not None:
        now_s = ends_s
    return now_s


def prompt(family: int, tokens: int) -> list[int]:
    return [family] * tokens


def told(engine: Engine) -> dict[str, set[int]]:
    """The tree blocks in each tier, by a snapshot."""
    state = engine.cache_state()
    runs = {"device": state.stored, **{tier.tier: tier.stored for tier in state.tiers}}
    return {tier: {block for one in stored for block in one.hashes} for tier, stored in runs.items()}


# By hand.


def test_what_is_evicted_goes_to_host_memory_and_is_brought_back_instead_of_computed() -> None:
    engine = new_engine(1024, (HOST, 4096))
    run(engine, new_call(prompt(1, 1000), 1))
    run(engine, new_call(prompt(2, 1000), 1))
    first, second = (set(HashChain(64, ROOT, prompt(family, 1000)).hashes) for family in (1, 2))
    now = told(engine)
    assert now["device"] >= second
    assert first <= now["device"] | now["host"]
    assert not now["device"] & now["host"]
    again = new_call(prompt(1, 1000), 1, now_s=10.0)
    engine.add(again)
    loads_until_s = engine.step(10.0).ends_s
    assert engine.idle, "nothing is computed meanwhile"
    assert loads_until_s == pytest.approx(10.0 + HOST.load_s(again.loaded_tokens))
    go_on(engine, 10.0)
    assert again.cached_tokens == 992
    assert 0 < again.loaded_tokens <= 992
    assert engine.counters.loaded_tokens == again.loaded_tokens == engine.cache_state().tiers[0].loaded_tokens
    assert first <= told(engine)["device"]


def test_other_calls_compute_while_one_loads() -> None:
    slow = TierLink("host", 5e-5)
    engine = new_engine(2048, (slow, 4096))
    for family in (1, 2, 3):
        run(engine, new_call(prompt(family, 1000), 1))
    loads, computes = new_call(prompt(1, 1000), 1, 10.0), new_call(prompt(4, 100), 1, 10.0)
    engine.add(loads)
    engine.add(computes)
    ends_s = engine.step(10.0).ends_s
    assert not engine.idle
    assert engine.running == [computes]
    assert ends_s is not None
    assert [output.call for output in engine.step(ends_s).outputs] == [computes]


def test_a_load_that_takes_longer_than_computing_is_left() -> None:
    engine = new_engine(1024, (TierLink("host", 1.0), 4096))
    for family in (1, 2, 1):
        call = new_call(prompt(family, 1000), 1)
        run(engine, call)
    assert call.loaded_tokens == 0
    assert engine.counters.computed_prompt_tokens > 2900


def test_host_memory_evicts_to_disk_and_a_load_takes_the_longer_of_both() -> None:
    engine = new_engine(1024, (HOST, 512), (DISK, 8192))
    for family in (1, 2, 3):
        run(engine, new_call(prompt(family, 1000), 1))
    assert told(engine)["disk"]
    call = new_call(prompt(1, 1000), 1, 10.0)
    engine.add(call)
    assert engine.step(10.0).ends_s == pytest.approx(10.0 + DISK.load_s(call.loaded_tokens))


def test_a_call_that_is_aborted_while_it_loads_leaves_nothing_behind() -> None:
    engine = new_engine(1024, (HOST, 4096))
    for family in (1, 2):
        run(engine, new_call(prompt(family, 1000), 1))
    call = new_call(prompt(1, 1000), 1, 10.0)
    engine.add(call)
    engine.step(10.0)
    assert engine.facts.loading
    engine.abort(call)
    assert engine.step(11.0).ends_s is None
    check_tiers(engine)
    assert engine.cache_state().kv.free_blocks + engine.cache_state().kv.cached_blocks == 64


def test_two_calls_that_need_the_same_blocks_load_them_once() -> None:
    engine = new_engine(2048, (HOST, 8192))
    for family in (1, 2, 3):
        run(engine, new_call(prompt(family, 1000), 1))
    calls = [new_call(prompt(1, 1000), 1, 10.0) for _ in range(2)]
    for call in calls:
        engine.add(call)
    run(engine, new_call(prompt(9, 1), 1), 10.0)
    assert [call.cached_tokens for call in calls] == [992, 992]
    assert sum(call.loaded_tokens for call in calls) <= 992


def test_what_came_back_from_disk_and_fell_to_host_memory_is_told_until_it_is_gone() -> None:
    engine = new_engine(512, (HOST, 512), (DISK, 512))
    for family in (1, 2, 3, 1, 2, 4, 5, 1, 6, 2):
        run(engine, new_call(prompt(family, 300), 1))
        check_tiers(engine)


# Whatever comes.


def check_tiers(engine: Engine) -> None:
    """Each tree block is told in the fastest tier that has its end, and the blocks add up."""
    blocks = engine._blocks
    check(blocks)
    device = {one for block, named in blocks._named.items() if block in blocks.cache for one in named.tree_blocks}
    now = told(engine)
    assert now.pop("device") == device
    for tier in now.values():
        assert not tier & device
    assert len(set(chain.from_iterable(now.values()))) == sum(map(len, now.values()))
    for block in blocks._named:
        assert block in blocks.cache or block in blocks.lower


Step = tuple[int, int, int, bool]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from((40, 128, 300, 480)), st.integers(1, 30), st.booleans())),
    st.sampled_from((512, 768, 1500)),
    st.sampled_from((0, 64, 512, 4096)),
    st.sampled_from((0, 256, 4096)),
    st.sampled_from(("slo", "fcfs", "hit_ratio")),
    st.sampled_from((16, 48, 64, 128)),
)
def test_all_calls_end_and_each_block_is_where_it_is_told(  # noqa: PLR0917 - drawn values
    calls: list[Step], kv_tokens: int, host_tokens: int, disk_tokens: int, scheduler: str, block_tokens: int
) -> None:
    tiers = [(link, tokens) for link, tokens in ((HOST, host_tokens), (DISK, disk_tokens)) if tokens]
    whole_blocks = -(-kv_tokens // block_tokens)  # the longest call has 510 tokens
    engine = new_engine(whole_blocks * block_tokens, *tiers, scheduler=scheduler, block_tokens=block_tokens)
    ended: list[EmbeddedCall] = []
    aborted, now_s = 0, 0.0
    for family, tokens, output, is_aborted in calls:
        call = new_call([family] * (tokens - tokens // 9) + [9] * (tokens // 9), output, now_s, block_tokens)
        engine.add(call)
        for _ in range(2):
            now_s = one_step(engine, now_s, ended)
            check_tiers(engine)
        if is_aborted and call not in ended:
            engine.abort(call)
            aborted += 1
            check_tiers(engine)
    while not (engine.idle and not engine.waiting and not engine.running):
        now_s = one_step(engine, now_s, ended)
        check_tiers(engine)
    assert len(ended) + aborted == len(calls)
    assert not engine.facts.loading
    kv = engine.cache_state().kv
    assert kv.free_blocks + kv.cached_blocks == kv.total_blocks


def one_step(engine: Engine, now_s: float, ended: list[EmbeddedCall]) -> float:
    step = engine.step(now_s)
    ended += [output.call for output in step.outputs if output.finished]
    assert step.ends_s is not None or not engine.waiting, "calls wait and nothing runs"
    return now_s if step.ends_s is None else step.ends_s


def brute_force(loads: Sequence[tuple[float, float]], step_s: float) -> Iterator[float]:
    """When each of the loads, (arrival, seconds) in order of arrival, is over, by looking at every moment."""
    queue = [(arrival_s, round(load_s / step_s)) for arrival_s, load_s in loads]
    moment = 0
    for arrival_s, steps in queue:
        while moment * step_s < arrival_s:
            moment += 1
        moment += steps
        yield moment * step_s


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=20))
def test_loads_of_a_link_follow_each_other(gaps: list[tuple[int, int]]) -> None:
    at, loads = 0, []
    for gap, length in gaps:
        at += gap
        loads.append((at * 0.5, length * 0.5))
    queue = LinkQueue()
    assert [queue.load(at_s, load_s) for at_s, load_s in loads] == list(brute_force(loads, 0.5))
    assert queue.wait_s(1e9) == 0.0
