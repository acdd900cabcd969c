"""The names of SGLang that the plugin relies on. A version without them is refused, with a list of those missing."""

from __future__ import annotations

from typing import Final

from plait.backends.adapter.required_names import Names, RequiredNames

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"

REQUIRED: Final = RequiredNames(
    engine="SGLang",
    package="sglang",
    without_plait="Start SGLang without Plait (SGLANG_PLUGINS=none)",
    reports=Names(
        methods={
            _SCHEDULER: ("server_args", "port_args"),
            f"{_SCHEDULER}._poll_timeout_aborts": (),
            f"{_SCHEDULER}.process_input_requests": ("recv_reqs",),
            f"{_SCHEDULER}._add_request_to_queue": ("req", "is_retracted"),
            f"{_SCHEDULER}.get_new_batch_prefill": ("running_batch",),
            f"{_SCHEDULER}.get_prefill_adder_class": (),
            f"{_SCHEDULER}.run_batch": ("batch",),
            f"{_SCHEDULER}.process_batch_result": ("batch", "result"),
            f"{_SCHEDULER}.abort_request": ("recv_req",),
            f"{_SCHEDULER}.process_pending_chunked_abort": (),
            f"{_SCHEDULER}.get_internal_state": ("recv_req",),
            f"{_ADDER}.add_chunked_req": ("req",),
            f"{_ADDER}.add_one_req": ("req", "has_chunked_req", "truncation_align_size"),
            f"{_ADDER}.ceil_paged_tokens": ("tokens",),
            f"{_ADDER}.budget_state": (),
            "sglang.srt.managers.schedule_policy.AddReqResult.CONTINUE": (),
            "sglang.srt.managers.schedule_policy.CacheAgnosticPolicy.FCFS": (),
            "sglang.srt.managers.schedule_batch.ScheduleBatch.release_req": ("idx", "remaing_req_count"),
            "sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch": (),
            "sglang.srt.managers.schedule_batch.release_req": (),
            "sglang.srt.managers.schedule_batch.Req.next_output_finishes_by_length": (),
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.gracefully_exit": (),
            "sglang.srt.mem_cache.kv_cache_builder.build_kv_cache": (),
            "sglang.srt.managers.io_struct.GetInternalStateReq": (),
            "sglang.srt.managers.io_struct.GetInternalStateReqOutput": (),
            "sglang.srt.runtime_context.get_parallel": (),
            "sglang.srt.runtime_context.get_serving": (),
            "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
        },
        attributes=(
            *("waiting_queue", "running_batch", "chunked_req", "last_batch", "result_queue", "enable_overlap"),
            *("is_mixed_chunk", "chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "page_size"),
            *(
                "max_total_num_tokens",
                "disaggregation_mode",
                "spec_algorithm",
                "dllm_config",
                "is_hybrid_ssm",
                "policy.policy",
            ),
            *("token_to_kv_pool_allocator.available_size", "req_to_token_pool", "hisparse_coordinator"),
            *("tree_cache.evictable_size", "tree_cache.take_events", "tree_cache.disable"),
            *("enable_priority_scheduling", "request_receiver.recv_requests", "_pending_chunked_abort_req"),
        ),
    ),
)
