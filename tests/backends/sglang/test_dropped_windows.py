"""Models with sliding windows or states: SGLang tells nothing of those that it drops, but finds them in a search."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from plait.backends.sglang.cache_state import untold
from plait.backends.sglang.calls import kv_state
from plait.policy.prefix.block_hash import chain
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from tests.backends.sglang.fake_scheduler import PAGE_TOKENS, Rank, Request, Setup

TREE_BLOCK = 64
PROMPT = range(600)


def tree(*, windows: bool = False, states: bool = False, disable: bool = False) -> Any:
    return SimpleNamespace(supports_swa=lambda: windows, supports_mamba=lambda: states, disable=disable)


def test_what_is_not_told_is_named() -> None:
    assert not untold(tree())
    assert untold(tree(windows=True)).endswith("end with sliding windows")
    assert untold(tree(states=True)).endswith("end with states")
    assert untold(tree(windows=True, states=True)).endswith("end with sliding windows and states")


def test_without_a_prefix_cache_there_is_nothing_to_tell() -> None:
    assert not untold(tree(windows=True, disable=True))


@pytest.mark.parametrize("has_windows", [False, True])
def test_the_report_says_it(has_windows: bool) -> None:
    rank = Rank(Setup(has_windows=has_windows), time.monotonic)
    assert bool(rank.plait.report(None, None).untold) == has_windows


def _raise() -> int:
    raise NotImplementedError


def test_pages_of_windows_are_not_counted() -> None:
    pool = SimpleNamespace(available_size=lambda: 16, full_available_size=lambda: 160)
    cache = SimpleNamespace(evictable_size=lambda: 320)
    scheduler = SimpleNamespace(
        page_size=16, max_total_num_tokens=1600, tree_cache=cache, token_to_kv_pool_allocator=pool
    )
    assert (kv_state(scheduler).free_blocks, kv_state(scheduler).cached_blocks) == (10, 20)
    cache.evictable_size, cache.full_evictable_size = _raise, lambda: 320
    assert kv_state(scheduler).cached_blocks == 20, "older versions count the pages of full attention apart"


class Waits:
    """Admits nothing, and notes the hits and the pages that the waiting calls need."""

    def plan(self, _: float, waiting: Sequence[LocalCall], __: Sequence[LocalCall], facts: EngineFacts) -> Plan:
        self.hits = [facts.cached_tokens(call) for call in waiting]
        self.needed = [facts.blocks_needed(call, call.prompt_tokens - facts.cached_tokens(call)) for call in waiting]
        return Plan((), ())


class Fields(SimpleNamespace):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Waits:
    for module, name in (("radix_cache", "RadixKey"), ("base_prefix_cache", "MatchPrefixParams")):
        path = f"sglang.srt.mem_cache.{module}"
        fake = ModuleType(path)
        setattr(fake, name, Fields)
        monkeypatch.setitem(sys.modules, path, fake)
    return Waits()


def rank_with_cached_prompt(policy: Waits, *, has_windows: bool) -> Rank:
    rank = Rank(Setup(has_windows=has_windows), time.monotonic, policy=policy)
    blocks = chain(PROMPT[:-1], TREE_BLOCK, rank.plait.observer.root(None))
    for parent, block in zip((None, *blocks), blocks, strict=False):
        rank.plait.observer.journal.store(block, parent)
    return rank


def step(rank: Rank, *received: Request) -> None:
    rank.begin_step([*rank._poll_timeout_aborts(), *received])
    rank.end_step()


def requests(number: int) -> list[Request]:
    return [Request(f"r{index}", PROMPT, 20, SimpleNamespace(custom_params=None)) for index in range(number)]


def test_hits_end_where_sglang_finds_them_to_end(policy: Waits) -> None:
    rank, asked = rank_with_cached_prompt(policy, has_windows=True), list[Any]()
    found = 128

    def match_prefix(parameters: Any) -> Any:
        asked.append(parameters.key)
        return SimpleNamespace(device_prefix_len=found)

    rank.tree_cache.match_prefix = match_prefix
    step(rank, *requests(2))
    assert policy.hits == [128, 128]
    assert policy.needed == [-(-len(PROMPT) // PAGE_TOKENS)] * 2
    assert [len(key.token_ids) for key in asked] == [len(PROMPT) - 1] * 2, "the last token is always computed"
    found = 1_000
    step(rank)
    assert policy.hits == [len(PROMPT) // TREE_BLOCK * TREE_BLOCK] * 2, "another call computed the window again"


def test_many_waiting_calls_are_asked_for_in_turn(policy: Waits) -> None:
    rank = rank_with_cached_prompt(policy, has_windows=True)
    rank.tree_cache.match_prefix = lambda _: SimpleNamespace(device_prefix_len=0)
    step(rank, *requests(17))
    limited = [sum(hit == 0 for hit in policy.hits)]
    for _ in range(3):
        step(rank)
        limited.append(sum(hit == 0 for hit in policy.hits))
    assert limited == [8, 16, 17, 17]


def test_versions_without_a_length_return_the_slots(policy: Waits) -> None:
    rank = rank_with_cached_prompt(policy, has_windows=True)
    rank.tree_cache.match_prefix = lambda _: SimpleNamespace(device_indices=range(64))
    step(rank, *requests(1))
    assert policy.hits == [64]


def test_a_model_with_full_attention_only_is_not_asked(policy: Waits) -> None:
    rank = rank_with_cached_prompt(policy, has_windows=False)
    step(rank, *requests(2))
    assert policy.hits == [len(PROMPT) // TREE_BLOCK * TREE_BLOCK] * 2
