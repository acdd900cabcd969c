"""The scheduler for vLLM's `--scheduler-cls`: vLLM's own, synchronous or asynchronous, which follows Plait's plans."""

from __future__ import annotations

from functools import cache
from typing import Any

from plait.backends.adapter.required_names import UnsupportedEngineError, load
from plait.backends.adapter.scheduler_settings import parse_settings
from plait.backends.protocol.cache_state import KvGroup, Tier
from plait.backends.vllm import plugin
from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.compatibility import RANKS, REQUIRED, limiting
from plait.backends.vllm.driver import VllmDriver, served_model
from plait.backends.vllm.hit_kinds import hit_kinds, left_interval
from plait.backends.vllm.offloading import find_offloading

_Hooked: Any = object
"""vLLM's scheduler, which comes behind the hooks in the method resolution order."""


class PlannedVllmScheduler(_Hooked):  # type: ignore[misc]
    """Hooks that come before vLLM's scheduler in the method resolution order. `plait` is the driver."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plait = _driver(self)
        self.cache_reports = plugin.CacheReports(self.plait)

    def add_request(self, request: Any) -> None:
        self.plait.received(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule an iteration. The arguments are vLLM's."""
        output = self.plait.step(lambda: super(PlannedVllmScheduler, self).schedule(*args, **kwargs))
        self.cache_reports.publish()
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
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
        """(running, waiting) requests, including waiting requests that the planner hides."""
        running, waiting = super().get_request_counts()
        return running, waiting + self.plait.held_back

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.plait.preemptions += 1
        super()._preempt_request(*args, **kwargs)


def create_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Build the scheduler with vLLM's arguments. Raises UnsupportedEngineError or SettingsError."""
    tier = REQUIRED.installed_tier()
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise UnsupportedEngineError("Plait does not schedule diffusion models; start vLLM without Plait")
    _check_ranks(vllm_config.parallel_config)
    plugin.install()
    made = scheduler_class(asynchronous=vllm_config.scheduler_config.async_scheduling, limits=tier == "chunks")
    return made(*args, **kwargs)


@cache
def scheduler_class(*, asynchronous: bool, limits: bool) -> Any:
    """The scheduler class of the installed vLLM, with our hooks. `limits` says whether it has the names for chunks."""
    base = load(f"vllm.v1.core.sched.{'async_scheduler.Async' if asynchronous else 'scheduler.'}Scheduler")
    hooks = (PlannedVllmScheduler, limiting(base)) if limits else (PlannedVllmScheduler,)
    return type(f"Planned{base.__name__}", (*hooks, base), {})


def _check_ranks(parallel: Any) -> None:
    """Raise UnsupportedEngineError if an API server has several schedulers and this vLLM lacks a way to each of them.

    When a rank of a dense model makes its scheduler, vLLM has set its data-parallel size to 1, but left its index.
    """
    several = parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0
    if not several or parallel.data_parallel_external_lb:
        return
    lacks = RANKS.missing_installed()
    if lacks:
        raise UnsupportedEngineError(
            f"Plait cannot reach the data-parallel ranks of this vLLM; it lacks: {', '.join(lacks)}. "
            "Start an API server for each rank (--data-parallel-rank), or start vLLM without Plait"
        )


def _check(scheduler: Any, tier: Tier) -> None:
    if tier != "reports" and not isinstance(
        scheduler.waiting, load("vllm.v1.core.sched.request_queue.FCFSRequestQueue")
    ):
        raise UnsupportedEngineError("Plait orders the calls itself; start vLLM with --scheduling-policy fcfs")
    if not scheduler.kv_cache_config.kv_cache_groups:
        raise UnsupportedEngineError("Plait does not schedule models without a KV cache; start vLLM without Plait")


def _driver(scheduler: Any) -> VllmDriver:
    REQUIRED.check_scheduler(scheduler)  # before `vllm_config.additional_config`, one of the names, is read
    manager, config = scheduler.kv_cache_manager, scheduler.vllm_config
    settings = parse_settings(config.additional_config)
    tier = REQUIRED.scheduler_tier(scheduler, settings.lowest_tier)
    _check(scheduler, tier)
    group_id = _observed_group(scheduler.kv_cache_config.kv_cache_groups)
    offloading = find_offloading(getattr(scheduler, "connector", None))
    observer = PoolObserver(
        manager.block_pool,
        group_id=group_id,
        block_tokens=manager.coordinator.single_type_managers[group_id].block_size,
        model=served_model(config),
        chunk_blocks=0 if offloading is None else offloading.chunk_blocks,
    )
    observer.groups = kv_groups(scheduler)
    kinds, observer.untold = hit_kinds(scheduler)
    if kinds:
        observer.follow_ends(kinds, manager.coordinator.scheduler_block_size, left_interval(manager.coordinator))
    lower = () if offloading is None else (offloading.follow(observer),)
    statuses = load("vllm.v1.request.RequestStatus")
    return VllmDriver(scheduler, observer, settings, statuses=statuses, tier=tier, lower=lower)


def kv_groups(scheduler: Any) -> list[KvGroup]:
    """The KV cache groups of a model with several, or with one that bounds a call's blocks; else none.

    vLLM sizes its pool by what the longest call takes, which is the bound of a group without full attention.
    """
    config, full = scheduler.vllm_config, load("vllm.v1.kv_cache_interface.FullAttentionSpec")
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    groups = []
    for group, manager in zip(scheduler.kv_cache_config.kv_cache_groups, managers, strict=True):
        spec = group.kv_cache_spec
        is_bounded = not isinstance(spec, full) and hasattr(spec, "max_memory_usage_bytes")
        most_blocks = -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) if is_bounded else 0
        groups.append(KvGroup(manager.block_size, most_blocks))
    return groups if len(groups) > 1 or groups[0].most_blocks else []


def _observed_group(groups: Any) -> int:
    """The first KV cache group with full attention: its content bounds what a prefix hit can reuse."""
    spec = load("vllm.v1.kv_cache_interface.FullAttentionSpec")
    full = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, spec)]
    return full[0] if full else 0
