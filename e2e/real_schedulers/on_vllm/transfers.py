"""Transfers to and from host memory, made up: a worker that ends them after some steps, in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput

LOAD_S = 0.25
"""What each transfer from host memory takes."""
MODEL_BYTES_PER_TOKEN = 128
"""Of the tests' model: keys and values of one head of 32 in bfloat16, in one layer."""
PAGE_BYTES = 4096
"""A chunk in host memory takes a multiple of this."""


def transfer_config(
    chunks: int, chunk_blocks: int, block_tokens: int, *, several: bool, **options: Any
) -> KVTransferConfig:
    """Offloading to host memory with room for so many chunks. `several` connectors are one of a MultiConnector."""
    chunk_bytes = -(-chunk_blocks * block_tokens * MODEL_BYTES_PER_TOKEN // PAGE_BYTES) * PAGE_BYTES
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": chunks * chunk_bytes,
            "block_size": chunk_blocks * block_tokens,
            **options,
        },
    }
    if not several:
        return KVTransferConfig(**offloading)
    connectors = {"connectors": [offloading]}
    return KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=connectors)


def tensors(tokens: int) -> list[KVCacheTensor]:
    """The cache's tensor, by whose size older versions know that of a block. Newer ones know it without."""
    if "shared_by" not in {one.name for one in fields(KVCacheTensor)}:
        return []
    return [KVCacheTensor(size=tokens * MODEL_BYTES_PER_TOKEN, shared_by=["layer"])]


def offloading_manager(connector: Any) -> Any:
    """What says what is in host memory."""
    (one,) = getattr(connector, "_connectors", [connector])
    manager = one.connector_scheduler.manager
    return getattr(manager, "primary_tier", manager)


def room(manager: Any) -> int:
    """How many chunks fit into host memory. Older versions round their sizes in another way."""
    found: int = manager._num_chunks if hasattr(manager, "_num_chunks") else manager._num_blocks
    return found


@dataclass(slots=True)
class Worker:
    """The worker's side of an OffloadingConnector. A transfer goes on for another step with this `patience`."""

    dice: random.Random = field(default_factory=lambda: random.Random(0))
    patience: float = 0.0
    loads: dict[int, str] = field(default_factory=dict)
    """The transfers from host memory that have not ended, and their requests."""
    stores: set[int] = field(default_factory=set)
    loaded: int = 0
    """How many transfers from host memory have ended."""

    def step(self, metadata: Any) -> KVConnectorOutput | None:
        """Take a step's transfers, and end some of those under way. vLLM waits for those that are to be flushed."""
        several = isinstance(metadata, MultiKVConnectorMetadata)
        if several:
            (metadata,) = metadata.metadata
        flushed = set(metadata.jobs_to_flush or ())
        self.loads.update((number, job.req_id) for number, job in metadata.load_jobs.items())
        self.stores.update(flushed & metadata.store_jobs.keys())
        ended = [
            number
            for number in (*self.loads, *sorted(self.stores))
            if number in flushed or self.dice.random() >= self.patience
        ]
        self.stores.update(metadata.store_jobs.keys() - flushed)  # they begin with the next step
        return self._output(ended, several=several) if ended else None

    def _output(self, ended: list[int], *, several: bool) -> KVConnectorOutput:
        worker = OffloadingWorkerMetadata()
        received = set()
        for number in ended:
            worker.mark_completed(number)
            self.stores.discard(number)
            if number in self.loads:
                received.add(self.loads.pop(number))
                worker.transfer_stats.load.record(1, LOAD_S)
                self.loaded += 1
        told = MultiKVConnectorWorkerMetadata(metadata=(worker,)) if several else worker
        return KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=told)
