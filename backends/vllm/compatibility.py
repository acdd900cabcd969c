"""The names of vLLM that Plait uses, and stand-ins for those that older versions lack.

The oldest version that is tested is 0.25. A version that lacks both a name and its stand-in gets a tier that needs
neither, or is refused if there is none. The check is for names, never for version numbers, once when a scheduler is
made.

| name | since | stand-in |
| --- | --- | --- |
| `max_num_active_reqs` | 0.31 | `max_num_running_reqs` |
| `kv_holding_waiting` | 0.31 | `skipped_waiting`, without the requests that only wait for their turn |
| `_request_blocks_can_be_freed` | 0.30 | whether there is no KV connector |
| `_reserve_prefill_lookahead` | 0.28 | `_mamba_block_aligned_split`, which is called at the same place |
| `requires_kv_delivery`, `drop_stale_output` | 0.27 | none: they are left out |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

from plait.backends.adapter.required_names import Names, RequiredNames

_SCHEDULER: Final = "vllm.v1.core.sched.scheduler.Scheduler"
_POOL: Final = "vllm.v1.core.block_pool.BlockPool"
_BLOCK_MAP: Final = "vllm.v1.core.block_pool.BlockHashToBlockMap"

_SLOTS: Final = ("max_num_active_reqs", "max_num_running_reqs")
_WAITING_ELSEWHERE: Final = ("kv_holding_waiting", "skipped_waiting")

_REPORTS: Final = Names(
    methods={
        _SCHEDULER: (),
        f"{_SCHEDULER}.schedule": (),
        f"{_SCHEDULER}.add_request": ("request",),
        f"{_SCHEDULER}.finish_requests": ("request_ids", "finished_status"),
        f"{_SCHEDULER}.update_from_output": ("scheduler_output", "model_runner_output"),
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler": (),
        f"{_POOL}.cache_full_blocks": (
            *("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id"),
        ),
        f"{_POOL}.touch": ("blocks",),
        f"{_POOL}.free_blocks": ("ordered_blocks",),
        f"{_POOL}.get_num_free_blocks": (),
        f"{_POOL}.reset_prefix_cache": (),
        f"{_BLOCK_MAP}.insert": ("key", "block"),
        f"{_BLOCK_MAP}.pop": ("key", "block_id"),
        "vllm.v1.kv_cache_interface.FullAttentionSpec": (),
        "vllm.v1.engine.core.EngineCore": (),
    },
    attributes=(
        *("waiting", "running", "requests"),
        *("vllm_config.additional_config", "vllm_config.model_config.served_model_name"),
        *("kv_cache_config.kv_cache_groups", "kv_cache_manager.coordinator.single_type_managers"),
        *("kv_cache_manager.block_pool.cached_block_hash_to_block", "kv_cache_manager.block_pool.num_gpu_blocks"),
    ),
)
_ORDER: Final = Names(
    methods={
        f"{_SCHEDULER}.get_request_counts": (),
        "vllm.v1.core.sched.request_queue.FCFSRequestQueue": (),
        f"{_BLOCK_MAP}.get_one_block": ("key",),
        "vllm.v1.request.RequestStatus": (),
        "vllm.v1.request.RequestStatus.WAITING": (),
        "vllm.v1.request.RequestStatus.PREEMPTED": (),
        "vllm.v1.core.sched.interface.PauseState.UNPAUSED": (),
    },
    attributes=(
        *("pause_state", "max_num_scheduled_tokens", "max_model_len", "num_lookahead_tokens"),
        *("num_waiting_for_streaming_input", "kv_cache_manager.block_pool.hash_block_size"),
    ),
    either_attribute=(_SLOTS, _WAITING_ELSEWHERE),
)
_CHUNKS: Final = Names(
    methods={f"{_SCHEDULER}._preempt_request": ("request", "timestamp")},
    attributes=(
        "connector",
        "need_mamba_block_aligned_split",
        "prev_step_scheduled_req_ids",
        "cache_config.block_size",
    ),
    either_method=(
        {
            f"{_SCHEDULER}._reserve_prefill_lookahead": ("request", "num_computed_tokens", "num_new_tokens"),
            f"{_SCHEDULER}._mamba_block_aligned_split": ("request", "num_new_tokens"),
        },
    ),
)

_OFFLOADING: Final = "vllm.v1.kv_offload.base.OffloadingManager"
OFFLOADING_CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector.OffloadingConnector"
CHUNK_BLOCKS: Final = ("blocks_per_chunk", "block_size_factor")
"""Attributes with the blocks of an offloaded chunk; since 0.26, and before."""
CHUNKS: Final = ("_num_chunks", "_num_blocks")
"""Attributes with the chunks that fit into host memory; since 0.30, and before."""
OFFLOADING: Final = Names(
    methods={
        OFFLOADING_CONNECTOR: (),
        f"{_OFFLOADING}.prepare_store": ("keys", "req_context"),
        f"{_OFFLOADING}.complete_store": ("keys", "req_context", "success"),
        f"{_OFFLOADING}.complete_load": ("keys", "req_context"),
        f"{_OFFLOADING}.reset_cache": (),
    },
    attributes=("manager", "config.num_workers", "build_connector_meta", "update_connector_output"),
    either_attribute=([f"config.{name}" for name in CHUNK_BLOCKS],),
)
"""What reports on host memory need in the scheduler's side of an `OffloadingConnector`."""

_CALL: Final = ("request_id", "prompt", "params", "arrival_time", "lora_request", "tokenization_kwargs")
RANKS: Final = Names(
    methods={
        "vllm.v1.engine.core_client.AsyncMPClient._call_utility_async": ("method", "args", "engine"),
        "vllm.v1.engine.async_llm.AsyncLLM.add_request": (*_CALL, "trace_headers", "priority", "data_parallel_rank"),
    },
    attributes=("core_engines",),
)
"""What several data-parallel ranks need: in the installed version, and in an API server's client of engine cores."""

REQUIRED: Final = RequiredNames(
    engine="vLLM",
    package="vllm",
    without_plait="Start vLLM without Plait's --scheduler-cls and --middleware",
    reports=_REPORTS,
    order=_ORDER,
    chunks=_CHUNKS,
)


class CompatibleScheduler:
    """The parts of a vLLM scheduler that differ between versions.

    A waiting request with a `ready` status could be admitted now. Below the tier `order`, only `slots` and
    `waiting_elsewhere` are used.
    """

    def __init__(self, scheduler: Any, ready: Collection[Any] = ()) -> None:
        self._scheduler = scheduler
        self._ready = ready
        self._slots = first_found(scheduler, _SLOTS, 0)
        self._waiting_elsewhere = first_found(scheduler, _WAITING_ELSEWHERE, ())
        self._skips = not hasattr(scheduler, "kv_holding_waiting")
        self._may_preempt: Callable[[Any], bool] = getattr(
            scheduler, "_request_blocks_can_be_freed", self._has_no_connector
        )
        self._drops_stale_output = hasattr(scheduler, "requires_kv_delivery")

    @property
    def slots(self) -> int:
        """The most requests that may run at once: --max-num-seqs, unless --max-num-active-seqs sets fewer.

        0: this version has neither name.
        """
        return int(self._slots(self._scheduler))

    @property
    def waiting_elsewhere(self) -> Iterable[Any]:
        """Requests that wait outside the waiting queue: for a transfer, and before 0.31 for a grammar or more input.

        Empty in a version that has neither name.
        """
        requests: Iterable[Any] = self._waiting_elsewhere(self._scheduler)
        return requests

    def count_loaded(self) -> int:
        """How many requests have loaded blocks and not begun. vLLM admits them first; no plan knows of them."""
        loaded: Collection[str] = getattr(self._scheduler, "finished_recving_kv_req_ids", ())
        return sum(one.status in self._ready or one.request_id in loaded for one in self.waiting_elsewhere)

    def take_back_skipped(self) -> None:
        """Put skipped requests that could be admitted now back into the waiting queue, where a plan can order them.

        Before 0.31, vLLM admits skipped requests before those in the queue.
        """
        if not self._skips or not self._scheduler.skipped_waiting:
            return
        skipped = self._scheduler.skipped_waiting
        ready = [request for request in skipped if request.status in self._ready]
        if ready:
            skipped.remove_requests(ready)
            self._scheduler.waiting.extend(ready)

    def preempt(self, request: Any) -> None:
        """Preempt a running request as vLLM does, unless a KV connector may still write to its blocks."""
        scheduler = self._scheduler
        if not self._may_preempt(request):
            return
        scheduler.running.remove(request)
        options = {"drop_stale_output": scheduler.requires_kv_delivery} if self._drops_stale_output else {}
        scheduler._preempt_request(request, time.monotonic(), **options)  # noqa: SLF001
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def _has_no_connector(self, _: Any) -> bool:
        return self._scheduler.connector is None


_Hooked: Any = object
"""vLLM's scheduler, behind the limits in the method resolution order. `plait` is its driver, which has the limits."""


class _LimitsInLookahead(_Hooked):  # type: ignore[misc]
    """Limits a request's tokens in an iteration where vLLM leaves room for the lookahead of a draft model."""

    def _reserve_prefill_lookahead(self, request: Any, computed: int, new: int) -> Any:
        limits = self.plait.limits
        if limits:  # usually there are none; this runs for each request of each iteration
            new = min(new, limits.get(request.request_id, new))
        return super()._reserve_prefill_lookahead(request, computed, new)


class _LimitsInSplit(_Hooked):  # type: ignore[misc]
    """Limits a request's tokens in an iteration where vLLM cuts the chunks of Mamba models at a block's end.

    vLLM calls that method only while `need_mamba_block_aligned_split` is set, so the hook sets it if there are limits.
    """

    need_mamba_block_aligned_split: bool
    _splits = True

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if not self.plait.limits:
            return super().schedule(*args, **kwargs)
        self._splits = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split = True
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.need_mamba_block_aligned_split, self._splits = self._splits, True

    def _mamba_block_aligned_split(self, request: Any, new: int, *args: Any) -> int:
        new = min(new, self.plait.limits.get(request.request_id, new))
        return super()._mamba_block_aligned_split(request, new, *args) if self._splits else new


def limiting(scheduler: type) -> type:
    """The class that limits a request's tokens in an iteration; a limit of 0 skips a running request.

    `scheduler` is vLLM's class, which comes later in the method resolution order.
    """
    return _LimitsInLookahead if hasattr(scheduler, "_reserve_prefill_lookahead") else _LimitsInSplit


def first_found(scheduler: Any, names: Sequence[str], otherwise: Any) -> Callable[[Any], Any]:
    """A function that reads the first of the attributes that a scheduler has; `otherwise` if it has none."""
    found = next((name for name in names if hasattr(scheduler, name)), None)
    return (lambda _: otherwise) if found is None else attrgetter(found)
