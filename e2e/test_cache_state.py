"""An engine's report of what its cache holds, as a gateway polls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from e2e.server_process import Server
from e2e.servers import Launcher
from plait.backends.protocol.cache_state import CacheState
from plait.policy.prefix.block_hash import chain, root_hash

TREE_BLOCK_TOKENS = 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine that nobody else uses."""
    with Launcher(tmp_path_factory.mktemp("cache")) as launch:
        engine = launch.engine("cache-1")
        engine.start()
        engine.wait_until_ready()
        yield engine


def report(engine: Server, **query: Any) -> CacheState:
    """The report, read as msgpack."""
    response = engine.get("/cache_state", params=query, headers={"accept": "application/msgpack"})
    assert response.headers["content-type"] == "application/msgpack"
    return msgspec.msgpack.decode(response.content, type=CacheState)


def compute(engine: Server, first_token: int, blocks: int = 2) -> list[int]:
    """Have the engine compute a prompt that begins with `first_token`; returns its tree blocks."""
    prompt = [first_token, *range(10, 10 + blocks * TREE_BLOCK_TOKENS)]
    request = {"model": "demo", "prompt": prompt, "max_tokens": 1}
    assert engine.post("/v1/completions", json=request).status_code == 200
    return list(chain(prompt, TREE_BLOCK_TOKENS, root_hash("demo")))


def stored(state: CacheState) -> list[int]:
    """The blocks that are new in a report."""
    return [block for run in state.stored for block in run.hashes]


def test_a_snapshot_names_the_blocks_as_the_gateway_does(engine: Server) -> None:
    blocks = compute(engine, 1)
    state = report(engine)
    assert len(blocks) == 2
    assert state.snapshot
    assert set(blocks) <= set(stored(state))
    assert (state.engine, state.model, state.granularity_tokens) == ("cache-1", "demo", TREE_BLOCK_TOKENS)
    assert state.kv.cached_blocks >= 2 * TREE_BLOCK_TOKENS // state.block_tokens
    assert state.kv.free_blocks + state.kv.cached_blocks == state.kv.total_blocks
    assert (state.queue.running, state.queue.waiting) == (0, 0)


def test_json_says_the_same_as_msgpack(engine: Server) -> None:
    compute(engine, 2)
    as_json = engine.get("/cache_state")
    assert as_json.headers["content-type"] == "application/json"
    assert msgspec.json.decode(as_json.content, type=CacheState) == report(engine)


def test_a_cursor_brings_what_changed_since(engine: Server) -> None:
    before = report(engine)
    blocks = compute(engine, 3)
    delta = report(engine, since=before.cursor, epoch=before.epoch)
    assert (delta.snapshot, stored(delta), delta.removed) == (False, blocks, [])
    assert delta.stored[0].parent is None
    unchanged = report(engine, since=delta.cursor, epoch=delta.epoch)
    assert (unchanged.snapshot, unchanged.cursor, unchanged.stored) == (False, delta.cursor, [])


def test_a_long_poll_returns_when_something_changes(engine: Server) -> None:
    before = report(engine)
    answers: list[CacheState] = []
    query = {"since": before.cursor, "epoch": before.epoch, "wait_ms": 30_000}
    poll = threading.Thread(target=lambda: answers.append(report(engine, **query)))
    poll.start()
    blocks = compute(engine, 4)
    poll.join()
    (state,) = answers
    assert not state.snapshot
    assert stored(state)[:1] == blocks[:1]
    assert state.cursor > before.cursor


def test_a_long_poll_without_a_change_returns_empty(engine: Server) -> None:
    before = report(engine)
    state = report(engine, since=before.cursor, epoch=before.epoch, wait_ms=20)
    assert (state.snapshot, state.stored, state.cursor) == (False, [], before.cursor)


@pytest.mark.parametrize("query", [{"since": 10**9}, {"since": 0, "epoch": "another"}], ids=["future", "epoch"])
def test_a_cursor_that_means_nothing_brings_a_snapshot(engine: Server, query: dict[str, Any]) -> None:
    blocks = compute(engine, 5)
    state = report(engine, **query, wait_ms=30_000)
    assert state.snapshot
    assert set(blocks) <= set(stored(state))


@pytest.mark.parametrize("name", ["since", "wait_ms"])
@pytest.mark.parametrize("value", ["x", "-1", "1.5", ""])
def test_a_number_that_is_none_is_named(engine: Server, name: str, value: str) -> None:
    response = engine.get("/cache_state", params={name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_evicted_blocks_are_reported_as_removed(launch: Launcher) -> None:
    engine = launch.engine("tiny", options=["--kv-tokens", "512"])
    engine.start()
    engine.wait_until_ready()
    first = compute(engine, 1, blocks=5)
    before = report(engine)
    second = compute(engine, 2, blocks=5)
    delta = report(engine, since=before.cursor, epoch=before.epoch)
    assert set(second) <= set(stored(delta))
    assert delta.removed
    assert set(delta.removed) <= set(first)
    assert first[0] in set(stored(before)) - set(delta.removed)  # evicted from its end: the root stays longest


def test_a_restart_begins_a_new_epoch_with_an_empty_cache(engine: Server) -> None:
    compute(engine, 6)
    before = report(engine)
    engine.kill()
    engine.start()
    engine.wait_until_ready()
    state = report(engine, since=before.cursor, epoch=before.epoch)
    assert state.epoch != before.epoch
    assert (state.snapshot, state.stored, state.kv.cached_blocks) == (True, [], 0)
