"""What the driver keeps from step to step is what it would find if it looked at SGLang's whole state in each step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.sglang.calls import SglangCall
from plait.policy.prefix.block_hash import chain
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from plait.policy.scheduling.slo_scheduler import SloScheduler
from tests.backends.sglang.fake_scheduler import PAGE_TOKENS, Rank, Request, Setup
from tests.examples import examples

TREE_BLOCK = 64
PAGES_OF_BLOCK = TREE_BLOCK // PAGE_TOKENS
FAMILIES = 3
"""Prompts of one family have the same tokens, up to their lengths."""
LONGEST_PROMPT = 600
EVENTS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, FAMILIES - 1), st.integers(1, LONGEST_PROMPT), st.floats(0, 500)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("cache"), st.integers(0, FAMILIES - 1), st.integers(0, LONGEST_PROMPT // TREE_BLOCK)),
)
SETUPS = st.builds(
    Setup,
    pages=st.integers(45, 150),
    chunk_tokens=st.sampled_from((64, 256)),
    max_running=st.integers(2, 8),
    mixes=st.booleans(),
    overlaps=st.booleans(),
)


class CheckedScheduler:
    """`slo`, which before each plan compares what it is shown with the state of SGLang's scheduler `rank`."""

    rank: Rank

    def __init__(self) -> None:
        self.plans = 0
        self._inner = SloScheduler()

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        self.plans += 1
        queue = self.rank.waiting_queue
        assert [_shown(call) for call in waiting] == [_as_waiting(request) for request in _by_arrival(queue)]
        assert [_shown(call) for call in running] == [_as_running(self.rank, one) for one in _running(self.rank)]
        assert all(isinstance(call, SglangCall) and call.waits for call in waiting)
        users = Counter(block for call in _calls(running) for block in call.tree_blocks)
        stored = self.rank.plait.observer.journal.stored
        for call in _calls(waiting):
            hit = _leading(call, stored)
            assert facts.cached_tokens(call) == hit * TREE_BLOCK
            used = min(hit, _leading(call, users)) * PAGES_OF_BLOCK
            assert facts.blocks_needed(call, 100) == _pages(hit * TREE_BLOCK + 100) - used
        for call in _calls(running):
            shared = _leading(call, {block for block, number in users.items() if number > 1}) * PAGES_OF_BLOCK
            assert facts.blocks_freed(call) == _pages(call.computed_tokens) - shared
            after = _pages(call.computed_tokens + 100)
            assert facts.blocks_needed(call, 100) == after - _pages(call.computed_tokens)
        return self._inner.plan(now_s, waiting, running, facts)


@settings(max_examples=examples(60))
@given(SETUPS, st.lists(st.lists(EVENTS, max_size=3), min_size=1, max_size=40))
def test_the_kept_facts_are_those_from_scratch(setup: Setup, steps: list[list[tuple[Any, ...]]]) -> None:
    checked = CheckedScheduler()
    rank = checked.rank = Rank(setup, time.monotonic, policy=checked)
    observer, numbers = rank.plait.observer, count()
    prompts = [range(family * 1000, family * 1000 + LONGEST_PROMPT) for family in range(FAMILIES)]
    chains = [chain(prompt, TREE_BLOCK, observer.root(None)) for prompt in prompts]
    for events in steps:
        received: list[Any] = []
        for kind, *values in events:
            if kind == "arrive":
                family, tokens, age_ms = values
                parameters = {"plait_ttft_ms": 500.0, "plait_tpot_ms": 50.0, "plait_age_ms": age_ms}
                name = f"r{next(numbers)}"
                received.append(Request(name, prompts[family][:tokens], 20, SimpleNamespace(custom_params=parameters)))
            elif kind == "abort":
                received.append(SimpleNamespace(rid=f"r{values[0]}"))
            else:
                _keep(observer.journal, chains[values[0]], values[1])
        rank.begin_step([*rank._poll_timeout_aborts(), *received])
        rank.end_step()


def test_sglangs_own_limit_of_calls_is_reported() -> None:
    rank = Rank(Setup(max_running=5), time.monotonic)
    assert rank.plait.report(None, None).scheduler.slots == 5


def test_a_request_that_sglang_queues_again_keeps_its_call() -> None:
    """A pause with retraction queues the running requests again, and does not call them retracted."""
    checked = CheckedScheduler()
    rank = checked.rank = Rank(replace(Setup(), overlaps=False), time.monotonic, policy=checked)
    request = Request("r", range(100), 20, SimpleNamespace(custom_params=None))
    for received in ([request], []):
        rank.begin_step(received)
        rank.end_step()
    call = request.plait_call
    rank._release(request)
    rank.running_batch.reqs, rank.last_batch = [], None
    rank._add_request_to_queue(request)
    assert request.plait_call is call
    assert call.max_output_tokens == 20
    assert rank.plait.preemptions == 1
    rank.begin_step([])
    assert checked.plans == 3


def _keep(journal: CacheJournal, blocks: Sequence[int], number: int) -> None:
    """Store the first `number` blocks of a chain, and remove the others."""
    for parent, block in zip((None, *blocks), blocks[:number], strict=False):
        journal.store(block, parent)
    for block in reversed(blocks[number:]):
        journal.remove(block)


def _by_arrival(queue: Iterable[Request]) -> list[Request]:
    return sorted(queue, key=lambda request: request.plait_call.order)


def _running(rank: Rank) -> list[Request]:
    """Requests with something to compute. One whose last token is being computed has nothing."""
    begun = [request for request in rank.running_batch.reqs if not request.finished()]
    in_flight = {id(request) for batch, _ in rank.result_queue for request in batch.reqs}
    decoding = [one for one in begun if not (id(one) in in_flight and one.next_output_finishes_by_length())]
    return _by_arrival([*([rank.chunked_req] if rank.chunked_req else []), *decoding])


def _shown(call: LocalCall) -> tuple[str, int, int, int]:
    return call.call_id, call.prompt_tokens, call.computed_tokens, call.output_tokens


def _as_waiting(request: Request) -> tuple[str, int, int, int]:
    return request.rid, len(request.origin_input_ids), 0, len(request.output_ids)


def _as_running(rank: Rank, request: Request) -> tuple[str, int, int, int]:
    prompt_tokens, output_tokens = len(request.origin_input_ids), len(request.output_ids)
    if request is rank.chunked_req:
        return request.rid, prompt_tokens, request.prefix_len, output_tokens
    output_tokens += any(request in batch.reqs for batch, _ in rank.result_queue)
    return request.rid, prompt_tokens, prompt_tokens + output_tokens - 1, output_tokens


def _calls(calls: Iterable[LocalCall]) -> list[SglangCall]:
    return [call for call in calls if isinstance(call, SglangCall)]


def _leading(call: SglangCall, blocks: Iterable[int] | Mapping[int, int]) -> int:
    """How many of a call's first tree blocks are among `blocks`."""
    found = set(blocks)
    return next((number for number, block in enumerate(call.tree_blocks) if block not in found), len(call.tree_blocks))


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
