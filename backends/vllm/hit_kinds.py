"""Which blocks the KV cache groups of a vLLM scheduler need where a prefix hit ends.

vLLM takes the longest prefix that all groups accept, as a multiple of all their block sizes: groups with full attention
need all blocks, those with a sliding window the blocks of the window, those with a state the last block.
"""

from __future__ import annotations

from math import inf
from typing import Any

from plait.backends.adapter.hit_ends import Kind


def hit_kinds(scheduler: Any) -> tuple[list[Kind], str]:
    """The kinds of groups of a model with several, full attention first, and "".

    No kinds: a hit can end after each block of the observed group (""), or the string says what is not told.
    """
    coordinator, pool = scheduler.kv_cache_manager.coordinator, scheduler.kv_cache_manager.block_pool
    managers = coordinator.single_type_managers
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    cached = [number for number, spec in enumerate(specs) if getattr(spec, "prefix_cacheable", True)]
    blocks = {number: _needed(specs[number]) for number in cached}
    if len(cached) <= 1 and None not in blocks.values() and inf in blocks.values():
        return [], ""
    unknown = {
        "a model without full attention": inf not in blocks.values(),
        "chunked local attention": None in blocks.values(),
        "draft models (EAGLE, MTP) beside windows or states": bool(getattr(coordinator, "eagle_group_ids", ())),
        "hits that end inside a block": getattr(coordinator, "enable_partial_hash_hits", False),
        "context parallelism beside windows or states": any(
            getattr(managers[number], "dcp_world_size", 1) > 1 for number in cached
        ),
        "blocks in lower tiers or from other engines": getattr(scheduler, "connector", None) is not None,
        "a cache in several pools": any(managers[number].block_pool is not pool for number in cached),
    }
    for what, is_true in unknown.items():
        if is_true:
            return [], f"where hits can end with {what}"
    kinds: dict[tuple[float, int], list[int]] = {}
    for number, needed in blocks.items():
        assert needed is not None
        kinds.setdefault((needed, managers[number].block_size), []).append(number)
    order = sorted(kinds, key=lambda kind: kind[0] != inf)
    return [Kind(tuple(kinds[kind]), kind[1], kind[0]) for kind in order], ""


def left_interval(coordinator: Any) -> int:
    """At which multiples of tokens calls leave ends, whatever their prompts; 0: at none. None in vLLM means everywhere.

    In the mode `align`, a call has states only where its chunks ended.
    """
    if any(getattr(one, "mamba_cache_mode", "") == "align" for one in coordinator.single_type_managers):
        return 0
    interval = getattr(coordinator, "retention_interval", None)
    return int(coordinator.scheduler_block_size if interval is None else interval)


def _needed(spec: Any) -> float | None:
    """How many blocks before a hit's end the layers of a group need; None: not known."""
    names = {one.__name__ for one in type(spec).__mro__}
    if "FullAttentionSpec" in names:
        return inf
    if "SlidingWindowSpec" in names:
        return float(max(1, -(-(spec.sliding_window - 1) // spec.block_size)))
    return 1 if "MambaSpec" in names else None
