"""The facts that plans are made from: what of a waiting call is cached now, and which blocks it takes."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.calls import VllmCall, VllmFacts
from plait.backends.vllm.compatibility import CompatibleScheduler
from tests.backends.vllm.fake_pool import Block, Pool, request
from tests.examples import examples

BLOCK_TOKENS = 16


def facts_of(pool: Pool) -> tuple[VllmFacts, dict[str, list[Block]]]:
    held: dict[str, list[Block]] = {}
    manager = SimpleNamespace(block_size=BLOCK_TOKENS, req_to_blocks=held)
    scheduler = SimpleNamespace(
        max_num_scheduled_tokens=512,
        max_num_active_reqs=8,
        kv_holding_waiting=[],
        num_waiting_for_streaming_input=1,
        num_lookahead_tokens=0,
        max_model_len=4096,
        kv_cache_manager=SimpleNamespace(block_pool=pool, coordinator=SimpleNamespace(single_type_managers=(manager,))),
    )
    observer = PoolObserver(pool, group_id=0, block_tokens=BLOCK_TOKENS, model="tiny")
    return VllmFacts(scheduler, CompatibleScheduler(scheduler, ()), observer), held


def call_of(tokens: list[int], **fields: int | bool) -> VllmCall:
    hashes = request(tokens, BLOCK_TOKENS).block_hashes
    return VllmCall("call", 0.0, len(tokens), received_s=0.0, order=(0.0, 0), block_hashes=hashes, **fields)  # type: ignore[arg-type]


def cache(pool: Pool, tokens: list[int]) -> list[Block]:
    sent = request(tokens, BLOCK_TOKENS)
    blocks = pool.take(len(sent.block_hashes))
    pool.cache_full_blocks(sent, blocks, 0, len(blocks), BLOCK_TOKENS, 0)
    return blocks


@settings(deadline=None, max_examples=examples(200))
@given(
    cached=st.lists(st.integers(0, 320), min_size=1, max_size=6),
    hint=st.integers(0, 400),
    length=st.integers(1, 320),
)
def test_the_hit_is_found_wherever_it_ends_and_however_it_moves(cached: list[int], hint: int, length: int) -> None:
    pool = Pool(200)
    facts, _ = facts_of(pool)
    tokens = list(range(320))
    call = call_of(tokens[:length], hint_tokens=hint)
    for now in cached:
        pool.free_blocks(block for block in pool.blocks if block.ref_cnt)
        assert pool.reset_prefix_cache()
        cache(pool, tokens[:now])
        whole = min(now, length - 1) // BLOCK_TOKENS
        assert facts.cached_tokens(call) == whole * BLOCK_TOKENS
        assert facts.cached_tokens(call) == whole * BLOCK_TOKENS


def test_a_call_that_may_not_read_the_cache_hits_nothing() -> None:
    pool = Pool(50)
    facts, _ = facts_of(pool)
    cache(pool, list(range(320)))
    assert facts.cached_tokens(call_of(list(range(320)), reads_cache=False)) == 0


def test_admission_takes_new_blocks_and_pins_idle_ones() -> None:
    pool = Pool(50)
    facts, _ = facts_of(pool)
    tokens = list(range(320))
    blocks = cache(pool, tokens[:160])
    call = call_of(tokens)
    assert facts.blocks_needed(call, 160) == 10, "the cached ones are in use: they cost nothing"
    pool.free_blocks(reversed(blocks[4:]))
    assert facts.blocks_needed(call, 160) == 16
    assert facts.blocks_needed(call, 1) == 7
    assert facts.free_blocks == 46


def test_a_running_call_takes_a_block_when_its_last_is_full() -> None:
    pool = Pool(50)
    facts, held = facts_of(pool)
    call = call_of(list(range(30)), waits=False)
    held["call"] = pool.take(2)
    call.computed_tokens, call.output_tokens = 31, 2
    assert facts.blocks_needed(call, 1) == 0
    call.computed_tokens, call.output_tokens = 32, 3
    assert facts.blocks_needed(call, 1) == 1
    pool.touch(held["call"][:1])
    assert facts.blocks_freed(call) == 1, "the other one is shared"


def test_who_is_in_no_plan_keeps_a_place() -> None:
    facts, _ = facts_of(Pool(1))
    assert (facts.max_running_calls, facts.max_batch_tokens) == (7, 512), "a streaming session waits for input"
    facts.silent_calls = 2
    assert facts.max_running_calls == 5


def test_a_preempted_call_starts_anew_with_its_output() -> None:
    pool = Pool(50)
    facts, _ = facts_of(pool)
    tokens = list(range(40))
    call = call_of(tokens)
    assert facts.cached_tokens(call) == 0
    running = SimpleNamespace(num_prompt_tokens=40, num_computed_tokens=44, num_tokens=45, num_output_placeholders=0)
    call.follow_running(running)
    assert (call.uncomputed_tokens, call.waits) == (1, False)
    cache(pool, tokens)
    call.follow_waiting(running)
    assert (call.uncomputed_tokens, call.waits, facts.cached_tokens(call)) == (45, True, 32)


def test_blocks_that_calls_can_share_have_one_key() -> None:
    facts, _ = facts_of(Pool(50))
    call, other = call_of(list(range(100))), call_of([*range(70), *range(500, 530)])
    same = [facts.block_key(call, at) == facts.block_key(other, at) for at in (0, 17, 48, 63, 64)]
    assert same == [True, True, True, True, False]
    assert (facts.block_key(call, 95) is None, facts.block_key(call, 96) is None) == (False, True), "6 whole blocks"
    assert facts.shared_tokens(call, other) == facts.shared_tokens(other, call) == 64
    assert facts.shared_tokens(call_of(list(range(64))), call) == 48, "the last token is always computed"


def test_a_call_that_may_not_read_the_cache_follows_none_but_may_lead() -> None:
    facts, _ = facts_of(Pool(50))
    call = call_of(list(range(100)), reads_cache=False)
    assert facts.block_key(call, 0) is None
    call.waits = False
    assert facts.block_key(call, 0) == facts.block_key(call_of(list(range(100))), 0)
