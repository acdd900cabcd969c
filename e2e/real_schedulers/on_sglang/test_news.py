"""What the API server is told, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from e2e.real_schedulers.built_engine import KV_TOKENS
from e2e.real_schedulers.on_sglang.engine import TREE_BLOCK_TOKENS
from e2e.real_schedulers.on_sglang.fixtures import Build
from plait.backends.protocol.cache_state import CacheState
from plait.backends.sglang.channel import VARIABLE, NewsReceiver

PROMPT_TOKENS = 16 * TREE_BLOCK_TOKENS


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[NewsReceiver]:
    with closing(NewsReceiver()) as receiver:
        monkeypatch.setenv(VARIABLE, receiver.name)
        yield receiver


@pytest.fixture
def seen(receiver: NewsReceiver, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> list[CacheState | None]:
    """What the API server was told last, at each forward pass."""
    seen: list[CacheState | None] = []
    forward = scheduler.model_worker.forward_batch_generation

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append(told(receiver))
        return forward(*args, **kwargs)

    monkeypatch.setattr(scheduler.model_worker, "forward_batch_generation", recorded)
    return seen


def test_an_eviction_is_told_before_the_batch_runs_that_needs_the_room(
    build: Build, receiver: NewsReceiver, seen: list[CacheState | None]
) -> None:
    engine = build()
    for first in range(KV_TOKENS // PROMPT_TOKENS):
        engine.add([first, *range(10, 9 + PROMPT_TOKENS)], 1)
        engine.run()
    known = told(receiver)
    assert known is not None
    seen.clear()
    engine.add([500, *range(10, 9 + PROMPT_TOKENS)], 1)
    engine.run()
    first_seen = seen[0]
    assert first_seen is not None
    assert first_seen.cursor > known.cursor
    assert first_seen.removed
    assert (first_seen.queue.running, first_seen.queue.waiting) == (1, 0)


def told(receiver: NewsReceiver) -> CacheState | None:
    """The report that came last."""
    receiver._read()
    latest = receiver._latest.get(0)
    return None if latest is None else msgspec.msgpack.decode(latest.report, type=CacheState)
