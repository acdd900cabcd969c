"""The names of SGLang that the plugin relies on, and what stands in for those that older versions lack.

A version that lacks both a name and its stand-in gets a tier that needs neither, or is refused if there is none.

| name | since | stand-in |
| --- | --- | --- |
| `get_prefill_adder_class` | 0.5.22 | the scheduler module's own `PrefillAdder`, while it schedules |
| `next_output_finishes_by_length` | 0.5.22 | the tokens so far and the limit |
| `prefix_len` | 0.5.22 | the length of `prefix_indices` |
| `lora_name` of an event | 0.5.22 | none, as SGLang has it by default |
| `result_queue` without overlap | 0.5.22 | an empty one: nothing is in flight |
| `chunked_req_limit` | 0.5.21 | less room for the chunk while it is added |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from plait.backends.adapter.required_names import Names, RequiredNames, load

_MODULE: Final = "sglang.srt.managers.scheduler"
_SCHEDULER: Final = f"{_MODULE}.Scheduler"
_ADDER: Final = "sglang.srt.managers.schedule_policy.PrefillAdder"

_REPORTS: Final = Names(
    methods={
        _SCHEDULER: ("server_args", "port_args"),
        f"{_SCHEDULER}._poll_timeout_aborts": (),
        f"{_SCHEDULER}.process_input_requests": ("recv_reqs",),
        f"{_SCHEDULER}._add_request_to_queue": ("req", "is_retracted"),
        f"{_SCHEDULER}.run_batch": ("batch",),
        f"{_SCHEDULER}.process_batch_result": ("batch", "result"),
        f"{_SCHEDULER}.abort_request": ("recv_req",),
        f"{_SCHEDULER}.process_pending_chunked_abort": (),
        f"{_SCHEDULER}.get_internal_state": ("recv_req",),
        "sglang.srt.mem_cache.kv_cache_builder.build_kv_cache": (),
        "sglang.srt.managers.io_struct.GetInternalStateReq": (),
        "sglang.srt.managers.io_struct.GetInternalStateReqOutput": (),
        "sglang.srt.runtime_context.get_parallel": (),
        "sglang.srt.runtime_context.get_serving": (),
        "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
    },
    attributes=(
        *("waiting_queue", "running_batch", "chunked_req", "last_batch", "page_size", "max_total_num_tokens"),
        *("disaggregation_mode", "token_to_kv_pool_allocator.available_size"),
        *("tree_cache.evictable_size", "tree_cache.take_events", "request_receiver.recv_requests"),
        "_pending_chunked_abort_req",
    ),
)
_ORDER: Final = Names(
    methods={
        f"{_SCHEDULER}.get_new_batch_prefill": ("running_batch",),
        "sglang.srt.managers.schedule_policy.CacheAgnosticPolicy.FCFS": (),
    },
    attributes=(
        *("result_queue", "enable_overlap", "is_mixed_chunk", "chunked_prefill_size", "max_prefill_tokens"),
        *("max_running_requests", "spec_algorithm", "dllm_config", "is_hybrid_ssm", "policy.policy"),
        *("hisparse_coordinator", "tree_cache.disable", "enable_priority_scheduling"),
    ),
)
_CHUNKS: Final = Names(
    methods={
        f"{_ADDER}.add_chunked_req": ("req",),
        f"{_ADDER}.add_one_req": ("req", "has_chunked_req", "truncation_align_size"),
        f"{_ADDER}.ceil_paged_tokens": ("tokens",),
        f"{_ADDER}.budget_state": (),
        "sglang.srt.managers.schedule_policy.AddReqResult.CONTINUE": (),
        "sglang.srt.managers.schedule_batch.ScheduleBatch.release_req": ("idx", "remaing_req_count"),
        "sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch": (),
        "sglang.srt.managers.schedule_batch.release_req": (),
    },
    attributes=("req_to_token_pool",),
    either_method=({f"{_SCHEDULER}.get_prefill_adder_class": (), f"{_MODULE}.PrefillAdder": ()},),
)

REQUIRED: Final = RequiredNames(
    engine="SGLang",
    package="sglang",
    without_plait="Start SGLang without Plait (SGLANG_PLUGINS=none)",
    reports=_REPORTS,
    order=_ORDER,
    chunks=_CHUNKS,
)


def complete(scheduler: Any) -> None:
    """Add the attributes that older versions only have with overlap."""
    if not getattr(scheduler, "enable_overlap", True) and not hasattr(scheduler, "result_queue"):
        scheduler.result_queue = deque()


def next_output_ends(request: Any) -> bool:
    """Whether a request's next output token is its last, by its limit."""
    finishes = getattr(request, "next_output_finishes_by_length", None)
    if finishes is not None:
        return bool(finishes())
    return bool(len(request.output_ids) + 1 >= request.sampling_params.max_new_tokens)


def prefix_tokens(request: Any) -> int:
    """How many of a request's tokens are in the KV cache."""
    found = getattr(request, "prefix_len", None)
    return len(request.prefix_indices) if found is None else int(found)


def add_limited_chunk(adder: Any, add: Callable[[Any], Any], request: Any, limit: int) -> Any:
    """Add the next chunk of the prompt in chunks by `add`, SGLang's method. The chunk has at most `limit` tokens."""
    if hasattr(adder, "chunked_req_limit"):
        adder.chunked_req_limit = min(limit, adder.chunked_req_limit or limit)
        return add(request)
    room = adder.rem_chunk_tokens
    adder.rem_chunk_tokens = limit
    try:
        return add(request)
    finally:
        adder.rem_chunk_tokens += room - limit


class CompatibleAdder:
    """Where a scheduler gets its adder from, if not from `get_prefill_adder_class`."""

    def __init__(self, scheduler: Any, limited: Callable[[type, Any], Callable[..., Any]]) -> None:
        self._limited = limited
        self._module = None if hasattr(scheduler, "get_prefill_adder_class") else load(_MODULE)

    @contextmanager
    def limiting(self, allowed: Any) -> Iterator[None]:
        """While this lasts, the scheduler's adders have the limits of `allowed`."""
        module = self._module
        if module is None:
            yield
            return
        base = module.PrefillAdder
        module.PrefillAdder = self._limited(base, allowed)
        try:
            yield
        finally:
            module.PrefillAdder = base
