"""What a stand-in of vLLM's OffloadingConnector is told and tells, in the engine's reports."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from plait.backends.vllm import compatibility
from plait.backends.vllm.offloading import find_offloading
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from tests.backends.vllm import fake_package
from tests.backends.vllm.fake_package import BLOCK_TOKENS, RequestStatus, build, send
from tests.backends.vllm.fake_pool import request

CHUNK_BLOCKS = 2
PROMPT = list(range(130))
TREE_BLOCKS = chain(PROMPT, 64, root_hash("tiny"))
BLOCK_HASHES = request(PROMPT, BLOCK_TOKENS).block_hashes
CHUNKS = [key + bytes(4) for key in BLOCK_HASHES[1::2]]


class OffloadingManager:
    """Has room for four chunks."""

    def __init__(self) -> None:
        self._num_chunks = 4
        self.chunks: list[bytes] = []

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        del req_context
        new = [key for key in keys if key not in self.chunks]
        if len(new) > self._num_chunks:
            return None
        evicted = self.chunks[: max(0, len(self.chunks) + len(new) - self._num_chunks)]
        self.chunks = [*self.chunks[len(evicted) :], *new]
        return SimpleNamespace(keys_to_store=new, evicted_keys=evicted)

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None: ...

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None: ...

    def reset_cache(self) -> None:
        self.chunks.clear()


class PrimaryTier(OffloadingManager):
    """Also takes chunks from the tier below."""

    def __init__(self) -> None:
        super().__init__()
        self.prepare_write, self.complete_write = self.prepare_store, self.complete_store


class OffloadingConnector:
    def __init__(self, manager: Any) -> None:
        self.connector_scheduler = SimpleNamespace(
            manager=manager,
            config=SimpleNamespace(blocks_per_chunk=CHUNK_BLOCKS, num_workers=2),
            build_connector_meta=lambda output: output,
            update_connector_output=lambda _: None,
        )


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package.install(monkeypatch)
    for path, one in (
        (compatibility.OFFLOADING_CONNECTOR, OffloadingConnector),
        ("vllm.v1.kv_offload.base.OffloadingManager", OffloadingManager),
    ):
        parts = path.split(".")[:-1]
        for end in range(2, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules or end == len(parts):
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[".".join(parts)])[one.__name__] = one


def build_with(connector: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fake_package.Scheduler, "made", connector)
    return build()


def compute(scheduler: Any) -> Sequence[Any]:
    """The prompt is computed. Its blocks are in use."""
    pool = scheduler.kv_cache_manager.block_pool
    blocks: Sequence[Any] = pool.take(9)
    pool.cache_full_blocks(request(PROMPT, BLOCK_TOKENS), blocks, 0, 8, BLOCK_TOKENS, 0)
    return blocks


def evict(scheduler: Any, blocks: Sequence[Any]) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    pool.free_blocks(reversed(blocks))
    pool.take(pool.get_num_free_blocks())


def tiers(scheduler: Any) -> tuple[set[int], set[int]]:
    """The tree blocks on the accelerator and in host memory."""
    state = scheduler.plait.report(None, None)
    (host,) = state.tiers
    assert host.tier == "host"
    device, lower = ({block for run in one.stored for block in run.hashes} for one in (state, host))
    return device, lower


def test_chunks_are_in_host_memory_once_their_transfer_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = OffloadingManager()
    scheduler = build_with(OffloadingConnector(manager), monkeypatch)
    manager.prepare_store([*CHUNKS, b"of another group" + b"\0\0\0\1"][:4], None)
    blocks = compute(scheduler)
    evict(scheduler, blocks)
    assert tiers(scheduler) == (set(), set())
    manager.complete_store(CHUNKS[:2], None)
    assert tiers(scheduler) == (set(), set(TREE_BLOCKS[:1]))
    manager.complete_store(CHUNKS[2:], None, success=False)
    assert tiers(scheduler) == (set(), set(TREE_BLOCKS[:1]))
    manager.prepare_store([b"other" + bytes(4)], None)
    assert tiers(scheduler) == (set(), set()), "the oldest was evicted for it"


def test_host_memory_that_is_full_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = OffloadingManager()
    build_with(OffloadingConnector(manager), monkeypatch)
    assert manager.prepare_store([bytes([number]) + bytes(4) for number in range(5)], None) is None


def test_capacity_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = OffloadingManager()
    connector = OffloadingConnector(manager)
    scheduler = build_with(connector, monkeypatch)
    manager.complete_load([*CHUNKS[:3], b"of another group" + b"\0\0\0\1"], None)
    stats = SimpleNamespace(load=SimpleNamespace(time=3.0))
    for meta in (SimpleNamespace(transfer_stats=stats), None):
        connector.connector_scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta))
    (host,) = scheduler.plait.report(None, None).tiers
    assert (host.total_blocks, host.loaded_tokens, host.loading_s) == (4 * CHUNK_BLOCKS, 3 * 2 * BLOCK_TOKENS, 1.5)


def test_the_primary_tier_is_host_memory_and_gets_chunks_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    primary = PrimaryTier()
    scheduler = build_with(OffloadingConnector(SimpleNamespace(primary_tier=primary)), monkeypatch)
    for prepare, complete in (
        (primary.prepare_store, primary.complete_store),
        (primary.prepare_write, primary.complete_write),
    ):
        blocks = compute(scheduler)
        prepare(CHUNKS, None)
        complete(CHUNKS, None)
        assert tiers(scheduler) == (set(TREE_BLOCKS), set())
        evict(scheduler, blocks)
        assert tiers(scheduler) == (set(), set(TREE_BLOCKS))
        primary.reset_cache()
        assert tiers(scheduler) == (set(), set())
        scheduler.kv_cache_manager.block_pool.free_blocks(list(scheduler.kv_cache_manager.block_pool.blocks))


def test_names_are_kept_until_the_step_has_begun_its_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = OffloadingManager()
    connector = OffloadingConnector(manager)
    scheduler = build_with(connector, monkeypatch)
    evict(scheduler, compute(scheduler))
    manager.prepare_store(CHUNKS[:2], None)
    assert connector.connector_scheduler.build_connector_meta("output") == "output"
    manager.complete_store(CHUNKS[:2], None)
    assert tiers(scheduler) == (set(), set(TREE_BLOCKS[:1]))
    manager.prepare_store(CHUNKS[2:], None)
    manager.complete_store(CHUNKS[2:], None)
    assert tiers(scheduler) == (set(), set(TREE_BLOCKS[:1])), "the names of the others are forgotten"


def test_it_is_found_among_several_connectors() -> None:
    assert find_offloading(None) is None
    assert find_offloading(SimpleNamespace(_connectors=[SimpleNamespace()])) is None
    found = find_offloading(SimpleNamespace(_connectors=[SimpleNamespace(), OffloadingConnector(OffloadingManager())]))
    assert found is not None
    assert found.chunk_blocks == CHUNK_BLOCKS


def test_a_version_without_it_reports_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, compatibility.OFFLOADING_CONNECTOR.rpartition(".")[0])
    assert build_with(SimpleNamespace(), monkeypatch).plait.report(None, None).tiers == []


def test_one_that_lacks_a_name_reports_no_host_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connector = OffloadingConnector(OffloadingManager())
    del connector.connector_scheduler.config.num_workers
    with caplog.at_level(logging.WARNING, "vllm.plait"):
        scheduler = build_with(connector, monkeypatch)
    assert scheduler.plait.report(None, None).tiers == []
    (line,) = caplog.messages
    assert line == (
        "Plait does not report what this vLLM keeps in host memory; it lacks: SimpleNamespace.config.num_workers"
    )


class Decodes:
    """Has no budget for a call that waits."""

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        del now_s, waiting, facts
        return Plan((), tuple((call, 1) for call in running), budget_tokens=len(running))


@pytest.mark.parametrize(
    ("status", "ended", "budget_tokens"), [("remote", [], 0), ("remote", ["a"], 1), ("ready", [], 1)]
)
def test_a_call_that_has_loaded_has_a_token_in_each_budget(
    status: str, ended: list[str], budget_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_package.Scheduler, "finished_recving_kv_req_ids", {*ended}, raising=False)
    scheduler = build(scheduler=f"{__name__}:Decodes")
    send(scheduler, "a", 100)
    scheduler.kv_holding_waiting.append(scheduler.waiting.pop())
    scheduler.kv_holding_waiting[0].status = RequestStatus.WAITING if status == "ready" else "remote"
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert scheduler.plait.report(None, None).iteration.budget_tokens == budget_tokens
