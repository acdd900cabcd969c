"""The scheduler for vLLM's `--scheduler-cls`: vLLM's own, synchronous or asynchronous, which follows Plait's plans."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from plait.backends.adapter.required_names import RequiredNames, UnsupportedEngineError, load
from plait.backends.adapter.scheduler_settings import parse_settings
from plait.backends.vllm import plugin
from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.driver import VllmDriver, served_model

REQUIRED: Final = RequiredNames(
    engine="vLLM",
    package="vllm",
    without_plait="Start vLLM without Plait's --scheduler-cls and --middleware",
    methods={
        "vllm.v1.core.sched.scheduler.Scheduler": (),
        "vllm.v1.core.sched.scheduler.Scheduler.schedule": (),
        "vllm.v1.core.sched.scheduler.Scheduler.add_request": ("request",),
        "vllm.v1.core.sched.scheduler.Scheduler.finish_requests": ("request_ids", "finished_status"),
        "vllm.v1.core.sched.scheduler.Scheduler.get_request_counts": (),
        "vllm.v1.core.sched.scheduler.Scheduler.update_from_output": ("scheduler_output", "model_runner_output"),
        "vllm.v1.core.sched.scheduler.Scheduler._preempt_request": ("request", "timestamp", "drop_stale_output"),
        "vllm.v1.core.sched.scheduler.Scheduler._request_blocks_can_be_freed": ("request",),
        "vllm.v1.core.sched.scheduler.Scheduler._reserve_prefill_lookahead": (
            *("request", "num_computed_tokens", "num_new_tokens"),
        ),
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler": (),
        "vllm.v1.core.sched.request_queue.FCFSRequestQueue": (),
        "vllm.v1.core.block_pool.BlockPool.cache_full_blocks": (
            *("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id"),
        ),
        "vllm.v1.core.block_pool.BlockPool.touch": ("blocks",),
        "vllm.v1.core.block_pool.BlockPool.free_blocks": ("ordered_blocks",),
        "vllm.v1.core.block_pool.BlockPool.get_num_free_blocks": (),
        "vllm.v1.core.block_pool.BlockPool.reset_prefix_cache": (),
        "vllm.v1.core.block_pool.BlockHashToBlockMap.insert": ("key", "block"),
        "vllm.v1.core.block_pool.BlockHashToBlockMap.pop": ("key", "block_id"),
        "vllm.v1.core.block_pool.BlockHashToBlockMap.get_one_block": ("key",),
        "vllm.v1.kv_cache_interface.FullAttentionSpec": (),
        "vllm.v1.request.RequestStatus": (),
        "vllm.v1.request.RequestStatus.WAITING": (),
        "vllm.v1.request.RequestStatus.PREEMPTED": (),
        "vllm.v1.core.sched.interface.PauseState.UNPAUSED": (),
        "vllm.v1.engine.core.EngineCore": (),
    },
    attributes=(
        *("waiting", "kv_holding_waiting", "running", "requests", "pause_state", "prev_step_scheduled_req_ids"),
        *("max_num_scheduled_tokens", "max_num_active_reqs", "max_model_len", "num_lookahead_tokens"),
        *(
            "num_waiting_for_streaming_input",
            "hash_block_size",
            "requires_kv_delivery",
            "need_mamba_block_aligned_split",
        ),
        *("vllm_config.additional_config", "vllm_config.model_config.served_model_name", "cache_config.block_size"),
        *("kv_cache_config.kv_cache_groups", "kv_cache_manager.coordinator.single_type_managers"),
        *("kv_cache_manager.block_pool.cached_block_hash_to_block", "kv_cache_manager.block_pool.num_gpu_blocks"),
    ),
)


if TYPE_CHECKING:

    class _VllmScheduler:
        """The parts of vLLM's scheduler that the hooks below use."""

        vllm_config: Any
        kv_cache_config: Any
        kv_cache_manager: Any
        waiting: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...

        def add_request(self, request: Any) -> None: ...

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any: ...

        def finish_requests(self, *args: Any, **kwargs: Any) -> Any: ...

        def get_request_counts(self) -> tuple[int, int]: ...

        def _preempt_request(self, *args: Any, **kwargs: Any) -> None: ...

        def _reserve_prefill_lookahead(self, request: Any, computed: int, new: int) -> int: ...

else:
    _VllmScheduler = object


class PlannedVllmScheduler(_VllmScheduler):
    """Hooks that come before vLLM's scheduler in the method resolution order. `plait` is the driver."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self)
        self.plait = _driver(self)
        self.cache_reports = plugin.CacheReports(self.plait)

    def add_request(self, request: Any) -> None:
        """A request has arrived from the API server."""
        self.plait.received(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule an iteration. The arguments are vLLM's."""
        output = self.plait.step(lambda: super(PlannedVllmScheduler, self).schedule(*args, **kwargs))
        self.cache_reports.publish()
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Process an iteration's output."""
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        self.plait.ended(scheduler_output, outputs)
        self.cache_reports.publish()
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """End requests from outside, for example after a client has gone."""
        ended = super().finish_requests(*args, **kwargs)
        self.plait.given_up()
        self.cache_reports.publish()  # there may be no iteration for long
        return ended

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting) requests, including waiting requests that are held back."""
        running, waiting = super().get_request_counts()
        return running, waiting + len(self.plait.levers.hidden)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.plait.preemptions += 1
        super()._preempt_request(*args, **kwargs)

    def _reserve_prefill_lookahead(self, request: Any, computed: int, new: int) -> int:
        """Limit a request's tokens in an iteration; 0 skips a running request."""
        limits = self.plait.levers.limits
        if limits:  # usually there are none; this runs for each request of each iteration
            new = min(new, limits.get(request.request_id, new))
        return super()._reserve_prefill_lookahead(request, computed, new)


def create_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Build the scheduler with vLLM's arguments. Raises UnsupportedEngineError or SettingsError."""
    REQUIRED.check_installed()
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise UnsupportedEngineError("Plait does not schedule diffusion models; start vLLM without Plait")
    _check_ranks(vllm_config.parallel_config)
    plugin.install()
    return scheduler_class(asynchronous=vllm_config.scheduler_config.async_scheduling)(*args, **kwargs)


@cache
def scheduler_class(*, asynchronous: bool) -> Any:
    """The scheduler class of the installed vLLM, with our hooks."""
    base = load(f"vllm.v1.core.sched.{'async_scheduler.Async' if asynchronous else 'scheduler.'}Scheduler")
    return type(f"Planned{base.__name__}", (PlannedVllmScheduler, base), {})


def _check_ranks(parallel: Any) -> None:
    """Raise UnsupportedEngineError if an API server has several schedulers: a report is of one.

    A rank of a dense model counts as a single engine by the time it makes its scheduler, but keeps its index.
    """
    ranks = parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0
    if ranks and not parallel.data_parallel_external_lb:
        raise UnsupportedEngineError(
            "Plait needs an API server for each data-parallel rank: start separate engines instead of vLLM with "
            "--data-parallel-size, or a server for each rank (--data-parallel-rank), or start vLLM without Plait"
        )


def _check(scheduler: Any) -> None:
    REQUIRED.check_scheduler(scheduler)
    if not isinstance(scheduler.waiting, load("vllm.v1.core.sched.request_queue.FCFSRequestQueue")):
        raise UnsupportedEngineError("Plait orders the calls itself; start vLLM with --scheduling-policy fcfs")
    if not scheduler.kv_cache_config.kv_cache_groups:
        raise UnsupportedEngineError("Plait does not schedule models without a KV cache; start vLLM without Plait")


def _driver(scheduler: Any) -> VllmDriver:
    manager, config = scheduler.kv_cache_manager, scheduler.vllm_config
    group_id = _observed_group(scheduler.kv_cache_config.kv_cache_groups)
    observer = PoolObserver(
        manager.block_pool,
        group_id=group_id,
        block_tokens=manager.coordinator.single_type_managers[group_id].block_size,
        model=served_model(config),
    )
    settings = parse_settings(config.additional_config)
    return VllmDriver(scheduler, observer, settings, statuses=load("vllm.v1.request.RequestStatus"))


def _observed_group(groups: Any) -> int:
    """The first KV cache group with full attention: its content bounds what a prefix hit can reuse."""
    spec = load("vllm.v1.kv_cache_interface.FullAttentionSpec")
    full = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, spec)]
    return full[0] if full else 0
