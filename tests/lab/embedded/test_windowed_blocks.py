"""A sliding window beside full attention, held against a search of the cache and a count of its blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import KvGroup
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.lower_tiers import TierSettings
from plait.policy.costs.tier_link import TierLink
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, root_hash, whole_hash
from plait.policy.scheduling.plan import LocalCall
from tests.invariants import check

COSTS = load_profile("a6000-mistral-7b").cost_model()
BLOCK = 16


def engine_of(**more: int | str) -> Engine:
    settings = {"name": "e", "model": "m", "kv_tokens": 16_000, "window_tokens": 128, "max_batch_tokens": 512} | more
    return Engine(EngineSettings(**settings), COSTS)  # type: ignore[arg-type]


def call_of(tokens: Sequence[int], output: int = 1, now_s: float = 0.0, first_output: int = 0) -> EmbeddedCall:
    root = root_hash("m")
    return EmbeddedCall(
        *("c", now_s, len(tokens)),
        chain=HashChain(BLOCK, root, tokens),
        tree_chain=HashChain(TREE_BLOCK_TOKENS, root, tokens),
        max_output_tokens=output,
        final_output_tokens=output,
        output=iter(range(first_output, first_output + output)),
        prompt=tokens,
    )


def run(engine: Engine, call: EmbeddedCall, now_s: float = 0.0) -> int | None:
    """The tokens that a call hits that is alone."""
    engine.add(call)
    while (ends_s := engine.step(now_s).ends_s) is not None:
        now_s = ends_s
    return call.cached_tokens


def hit(engine: Engine, call: LocalCall) -> int:
    """The oracle: the longest hit that both groups accept, as vLLM searches it."""
    assert isinstance(call, EmbeddedCall)
    cache, hashes = engine._blocks.cache, call.chain.hashes
    needed = -(-(engine.settings.window_tokens - 1) // BLOCK)
    for end in range((call.prompt_tokens + call.output_tokens - 1) // BLOCK, 0, -1):
        window = hashes[max(0, end - needed) : end]
        if all(one in cache for one in hashes[:end]) and all(~one in cache for one in window):
            return end * BLOCK
    return 0


def test_the_second_call_pins_the_junction_and_the_third_hits_it() -> None:
    engine, shared = engine_of(), list(range(800))
    prompts = [[*shared, *range(10_000 * place, 10_000 * place + 300)] for place in (1, 2, 3)]
    assert [run(engine, call_of(prompt)) for prompt in prompts] == [0, 0, 800]
    assert [run(engine, call_of(prompt)) for prompt in prompts] == [1088, 1088, 1088], "each prompt has its end"


def test_an_answer_leaves_no_end() -> None:
    engine, first = engine_of(), list(range(500))
    run(engine, call_of(first, output=200, first_output=1_000))
    longer = [*first, *range(1_000, 1_200), *range(5_000, 5_100)]
    call = call_of(longer)
    assert run(engine, call) == 496
    assert call.matched_blocks * BLOCK == 688, "full attention has the answer, but for a token"
    assert run(engine, call_of([*longer, 7])) == 800 - BLOCK


def test_a_short_prompt_hits_with_fewer_blocks_than_the_window() -> None:
    engine = engine_of()
    run(engine, call_of(range(40)))
    assert run(engine, call_of(range(41))) == 32


def test_a_call_holds_its_latest_window_only() -> None:
    engine, call = engine_of(max_batch_tokens=64), call_of(range(2_000), output=50)
    engine.add(call)
    most, now_s = 0, 0.0
    while (ends_s := engine.step(now_s).ends_s) is not None:
        now_s = ends_s
        most = max(most, len(call.window_blocks))
    assert most <= engine.cache_state().kv.groups[1].most_blocks == (127 + 128 + 15) // 16 + 1
    kv = engine.cache_state().kv
    assert kv.cached_blocks == 2_048 // BLOCK + 8, "the prompt and the answer but for a token, and the prompt's window"


def test_the_report_has_the_ends() -> None:
    engine = engine_of()
    call = call_of(range(1_000))
    run(engine, call)
    report = engine.cache_state()
    assert report.ends is not None
    assert report.ends.opened == []
    before = call.tree_chain.hashes[14]
    name = whole_hash(range(960, 992), before)
    assert report.ends.inside == [(before, 32, name)], "992 tokens end in the sixteenth tree block"
    assert report.kv.groups == [KvGroup(16), KvGroup(16, (127 + 1024 + 15) // 16 + 1)]
    cursor = report.cursor
    run(engine, call_of(range(20_000, 35_000)))
    later = engine.cache_state(cursor)
    assert later.ends is not None
    assert set(later.removed) >= set(call.tree_chain.hashes[14:15])
    assert later.ends.closed == [name]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("scheduler", ["fcfs", "slo"])
@pytest.mark.parametrize("seed", range(3))
def test_hits_and_blocks_under_a_random_load(seed: int, scheduler: str, ahead: int) -> None:
    draw = random.Random(100 * seed + ahead)
    kv_tokens = draw.choice([1_600, 3_200, 6_400])
    window_tokens = draw.choice([1, 2, 16, 17, 100, 400])
    engine = engine_of(
        kv_tokens=kv_tokens,
        window_tokens=window_tokens,
        max_batch_tokens=draw.choice([64, 200]),
        max_running_calls=draw.choice([2, 8]),
        scheduler=scheduler,
        ahead=ahead,
    )
    prompts: list[list[int]] = [[]]
    calls: list[EmbeddedCall] = []
    now_s: float | None = 0.0
    clock_s = 0.0
    for _ in range(120):
        if draw.random() < 0.5:
            prefix = draw.choice(prompts)
            prefix = prefix[: draw.choice([len(prefix), draw.randrange(len(prefix) + 1)])]
            prompt = [*prefix, *(draw.randrange(10**6) for _ in range(draw.randrange(1, 300)))][-700:]
            output = draw.choice([1, 5, 60])
            if engine.fits(len(prompt), output):
                prompts.append(prompt)
                calls.append(call := call_of(prompt, output, clock_s))
                engine.add(call)
        if calls and draw.random() < 0.05:
            engine.abort(draw.choice(calls))
        clock_s, now_s = _step(engine, clock_s)
    while now_s is not None:
        clock_s, now_s = _step(engine, clock_s)
    assert not engine.waiting
    assert not engine.running
    assert engine.counters.cached_prompt_tokens > 0


def _step(engine: Engine, now_s: float) -> tuple[float, float | None]:
    ends_s = engine.step(now_s).ends_s
    _check(engine)
    return (now_s if ends_s is None else ends_s), ends_s


def _check(engine: Engine) -> None:
    cache = engine._blocks.cache
    check(cache)
    used = set()
    for call in engine.running:
        assert len(call.blocks) * BLOCK >= call.computed_tokens
        assert (
            len(call.window_blocks) - 1
        ) * BLOCK < engine.settings.window_tokens + 3 * engine.settings.max_batch_tokens
        assert not set(call.blocks) & set(call.window_blocks)
        used |= {*call.blocks, *call.window_blocks}
    assert len(used) + cache.free_blocks == cache.total_blocks
    for call in engine.waiting:
        assert engine.facts.cached_tokens(call) == hit(engine, call)


@pytest.mark.parametrize("scheduler", ["fcfs", "slo"])
def test_calls_wait_for_a_leader_that_leaves_an_end(scheduler: str) -> None:
    """At once: one alone, which leaves no end that others can use, then some that share its prefix."""
    engine, shared = engine_of(scheduler=scheduler, max_batch_tokens=2_048), list(range(1_600))
    prompts = [[*shared, *range(10_000 * place, 10_000 * place + 50)] for place in range(1, 6)]
    run(engine, call_of(prompts[0]))
    calls = [call_of(prompt, now_s=1.0 + place / 1e3) for place, prompt in enumerate(prompts[1:])]
    for call in calls:
        engine.add(call)
    assert [engine.facts.shared_tokens(calls[1], other) for other in (calls[0], calls[1])] == [1_600, 1_648]
    now_s: float | None = 1.0
    while now_s is not None:
        now_s = engine.step(now_s).ends_s
    assert [call.cached_tokens for call in calls] == [0, 1_600, 1_600, 1_600]


def test_a_first_call_leads_nobody() -> None:
    engine, shared = engine_of(), list(range(1_600))
    first, second = (call_of([*shared, place], now_s=place / 1e3) for place in (1, 2))
    engine.add(first)
    engine.add(second)
    assert engine.facts.shared_tokens(second, first) == 1_600, "the end of its prompt"
    third = call_of([*shared[:900], 7])
    assert engine.facts.shared_tokens(third, first) == 0


def test_a_window_has_no_lower_tiers() -> None:
    tier = TierSettings(TierLink.of("host", 1_000, 10.0, 0.0), 1_000)
    settings = EngineSettings(name="e", model="m", kv_tokens=160, window_tokens=64, lower=(tier,))
    with pytest.raises(ValueError, match="no lower tiers"):
        Engine(settings, COSTS)
