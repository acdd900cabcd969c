"""Cache-state reports that no engine should send."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

Run = list[Any]
"""A parent or None, and the hashes that follow it."""

_MANY = 1_000_000


def report(*runs: Run, **fields: Any) -> bytes:
    """A report that would do, with these runs stored, and with other fields replaced."""
    kv = {"total_blocks": 4096, "free_blocks": 4000, "cached_blocks": 96}
    good: dict[str, Any] = {"engine": "scripted", "kind": "embedded", "epoch": "e", "cursor": 1, "model": "demo"}
    good |= {"block_tokens": 16, "granularity_tokens": 64, "snapshot": True, "removed": [], "kv": kv}
    return msgspec.msgpack.encode({**good, "stored": list(runs), **fields})


def duplicate_runs() -> bytes:
    """The same run twice."""
    return report([None, [11, 12, 13]], [None, [11, 12, 13]])


def two_parents() -> bytes:
    """A block behind two others."""
    return report([None, [11, 12, 13]], [None, [21, 13]])


def cyclic_runs() -> bytes:
    """Two runs that follow each other."""
    return report([33, [31, 32]], [32, [33]])


def own_child() -> bytes:
    """A block that follows itself."""
    return report([None, [41]], [42, [42]])


def huge_cursor() -> bytes:
    """A cursor that no signed integer of 64 bits holds."""
    return report([None, [11]], cursor=2**64 - 1)


def negative_cursor() -> bytes:
    """A cursor below zero."""
    return report([None, [11]], cursor=-(2**63))


def wrong_granularity() -> bytes:
    """Blocks of another length than the gateway's."""
    return report([None, [11]], granularity_tokens=48)


def zero_blocks() -> bytes:
    """Blocks without tokens."""
    return report([None, [11]], granularity_tokens=0, block_tokens=0)


def absurd_kv() -> bytes:
    """More free blocks than there are, and those beyond any memory."""
    return report([None, [11]], kv={"total_blocks": -5, "free_blocks": 2**62, "cached_blocks": -(2**62)})


def wrong_types() -> bytes:
    """Texts where numbers belong."""
    return report([None, ["eleven"]], cursor="first", kv="much")


def removes_unknown() -> bytes:
    """Blocks removed that were never stored."""
    return report(removed=list(range(1000)), snapshot=False)


def random_bytes() -> bytes:
    """No report at all."""
    return Random(19).randbytes(4096)


def many_hashes() -> bytes:
    """More blocks than the cache can have."""
    return report([None, list(range(1, _MANY + 1))])
