"""The names of vLLM that the plugin relies on. A version without them is refused, with a list of the missing names."""

from __future__ import annotations

from typing import Final

from plait.backends.adapter.required_names import RequiredNames

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
