"""Follows which chunks vLLM's OffloadingConnector has in host memory, by wrapping its manager's methods.

vLLM calls the manager, in the scheduler's process, before a transfer begins and after its end. The manager answers with
the chunks that it evicts for the transfer. A manager with tiers below host memory (`TieringOffloadingManager`) has a
manager of its own for host memory, its `primary_tier`. The tiers below are not reported: other processes may remove
files there without vLLM's knowledge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

from plait.backends.adapter.required_names import load
from plait.backends.adapter.tier_journal import TierJournal
from plait.backends.vllm.cache_state import PoolObserver, wrap
from plait.backends.vllm.compatibility import CHUNK_BLOCKS, CHUNKS, OFFLOADING, OFFLOADING_CONNECTOR, first_found

_log = logging.getLogger("vllm.plait")

_STORES: Final = (("prepare_store", "complete_store"), ("prepare_write", "complete_write"))
"""Transfers to host memory: from the accelerator, and from the tiers below, which only some managers have."""


class Offloading:
    """The scheduler's side of one OffloadingConnector. A chunk has `chunk_blocks` blocks of the accelerator."""

    def __init__(self, connector_scheduler: Any) -> None:
        config, manager = connector_scheduler.config, connector_scheduler.manager
        self.chunk_blocks = int(first_found(config, CHUNK_BLOCKS, 1)(config))
        self._scheduler = connector_scheduler
        self._manager = getattr(manager, "primary_tier", manager)
        self._workers = max(1, int(config.num_workers))

    def follow(self, observer: PoolObserver) -> TierJournal:
        """Report the chunks in host memory to the observer from now on. Returns the tier."""
        assert observer.tiered is not None
        self._blocks, self._suffix = observer.tiered, observer.group_suffix
        self._chunk_tokens = self.chunk_blocks * observer.block_tokens
        capacity = int(first_found(self._manager, CHUNKS, 0)(self._manager)) * self.chunk_blocks
        self._tier = TierJournal("host", self._blocks.host, capacity)
        for begins, ends in _STORES:
            if hasattr(self._manager, begins):
                wrap(self._manager, begins, self._prepare)
                wrap(self._manager, ends, self._complete)
        wrap(self._manager, "complete_load", self._loaded)
        wrap(self._manager, "reset_cache", self._reset)
        wrap(self._scheduler, "build_connector_meta", self._end_step)
        wrap(self._scheduler, "update_connector_output", self._update)
        return self._tier

    def _prepare(self, prepare: Callable[..., Any], keys: Collection[bytes], *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(keys, *args, **kwargs)
        if prepared is not None:
            self._blocks.dropped(self._of_group(prepared.evicted_keys))
            self._blocks.storing(self._of_group(prepared.keys_to_store))
        return prepared

    def _complete(
        self, complete: Callable[..., None], keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        complete(keys, req_context, success)
        (self._blocks.stored if success else self._blocks.failed)(self._of_group(keys))

    def _loaded(self, complete: Callable[..., None], keys: Collection[bytes], *args: Any, **kwargs: Any) -> None:
        complete(keys, *args, **kwargs)
        self._tier.loaded_tokens += len(self._of_group(keys)) * self._chunk_tokens

    def _reset(self, reset: Callable[..., None]) -> None:
        reset()
        self._blocks.dropped_all()

    def _end_step(self, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        meta = build(*args, **kwargs)
        self._blocks.end_step()
        return meta

    def _update(self, update: Callable[..., None], connector_output: Any) -> None:
        stats = getattr(connector_output.kv_connector_worker_meta, "transfer_stats", None)
        loading_s = 0.0 if stats is None else stats.load.time
        update(connector_output)
        self._tier.loading_s += loading_s / self._workers  # the sum over workers, which load at the same time

    def _of_group(self, keys: Iterable[bytes]) -> list[bytes]:
        return [key for key in keys if key.endswith(self._suffix)]


def find_offloading(connector: Any) -> Offloading | None:
    """The OffloadingConnector of a scheduler, which may be one of several (`MultiConnector`).

    None if there is none, or, with a line in the log, if this vLLM lacks the names for reports on it.
    """
    if connector is None:
        return None
    kind = load(OFFLOADING_CONNECTOR)
    if kind is None:
        return None
    for one in (connector, *getattr(connector, "_connectors", ())):
        if isinstance(one, kind):
            found = one.connector_scheduler
            lacks = [*OFFLOADING.missing_installed(), *OFFLOADING.missing_in(found)]
            if not lacks:
                return Offloading(found)
            _log.warning("Plait does not report what this vLLM keeps in host memory; it lacks: %s", ", ".join(lacks))
    return None
