"""Which groups of a vLLM scheduler the adapter can follow. Their specs are made up, with vLLM's names."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from plait.backends.adapter.hit_ends import Kind
from plait.backends.vllm.hit_kinds import hit_kinds, left_interval


class FullAttentionSpec: ...


class MLAAttentionSpec(FullAttentionSpec): ...


class SlidingWindowSpec:
    def __init__(self, sliding_window: int, block_size: int = 16) -> None:
        self.sliding_window, self.block_size = sliding_window, block_size


class SlidingWindowMLASpec(SlidingWindowSpec): ...


class MambaSpec: ...


class ChunkedLocalAttentionSpec: ...


class CircularBufferSpec:
    prefix_cacheable = False


def scheduler(*specs: Any, pools: int = 1, **coordinator: Any) -> Any:
    made = [object() for _ in range(pools)]
    managers = [
        SimpleNamespace(
            block_size=getattr(spec, "block_size", 16),
            block_pool=made[number % pools],
            dcp_world_size=coordinator.get("ranks", 1),
        )
        for number, spec in enumerate(specs)
    ]
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]),
        kv_cache_manager=SimpleNamespace(
            block_pool=made[0], coordinator=SimpleNamespace(single_type_managers=managers, **coordinator)
        ),
    )


FULL, WINDOW = FullAttentionSpec(), SlidingWindowSpec(100)


@pytest.mark.parametrize("spec", [FULL, MLAAttentionSpec()])
@pytest.mark.parametrize("coordinator", [{}, {"eagle_group_ids": {0}}, {"ranks": 2}])
def test_one_group_with_full_attention_is_followed_block_by_block(spec: Any, coordinator: dict[str, Any]) -> None:
    assert hit_kinds(scheduler(spec, CircularBufferSpec(), **coordinator)) == ([], "")


def test_full_attention_comes_first_and_equal_groups_are_of_one_kind() -> None:
    kinds, untold = hit_kinds(
        scheduler(WINDOW, FULL, SlidingWindowMLASpec(100), MambaSpec(), SlidingWindowSpec(1), MLAAttentionSpec())
    )
    assert kinds == [Kind((1, 5), 16, inf), Kind((0, 2), 16, 7), Kind((3, 4), 16, 1)]
    assert untold == ""


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (scheduler(WINDOW), "a model without full attention"),
        (scheduler(WINDOW, MambaSpec()), "a model without full attention"),
        (scheduler(FULL, ChunkedLocalAttentionSpec()), "chunked local attention"),
        (scheduler(FULL, WINDOW, eagle_group_ids={1}), "draft models (EAGLE, MTP) beside windows or states"),
        (scheduler(FULL, WINDOW, enable_partial_hash_hits=True), "hits that end inside a block"),
        (scheduler(FULL, WINDOW, ranks=2), "context parallelism beside windows or states"),
        (scheduler(FULL, WINDOW, pools=2), "a cache in several pools"),
    ],
)
def test_what_is_not_followed_is_said(made: Any, what: str) -> None:
    assert hit_kinds(made) == ([], f"where hits can end with {what}")


@pytest.mark.parametrize(
    ("mode", "retention", "interval"),
    [("", {"retention_interval": 0}, 0), ("", {"retention_interval": 256}, 256), ("", {}, 64), ("align", {}, 0)],
)
def test_the_interval_at_which_calls_leave_ends(mode: str, retention: dict[str, int], interval: int) -> None:
    managers = [SimpleNamespace(), SimpleNamespace(mamba_cache_mode=mode)]
    made = SimpleNamespace(single_type_managers=managers, scheduler_block_size=64, **retention)
    assert left_interval(made) == interval
