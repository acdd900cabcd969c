"""Models with sliding windows or states: SGLang tells nothing of those that it drops."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from plait.backends.sglang.cache_state import untold
from plait.backends.sglang.calls import kv_state
from tests.backends.sglang.fake_scheduler import Rank, Setup


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
