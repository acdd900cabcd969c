"""The names of SGLang that the plugin relies on, and stand-ins for those that older versions lack.

A version that lacks both a name and its stand-in gets a tier that needs neither, or is refused if there is none.

| name | since | stand-in |
| --- | --- | --- |
| `get_prefill_adder_class` | 0.5.22 | the scheduler module's own `PrefillAdder`, while it schedules |
| `next_output_finishes_by_length` | 0.5.22 | the tokens so far and the limit |
| `prefix_len` | 0.5.22 | the length of `prefix_indices` |
| `lora_name` of an event | 0.5.22 | none, as SGLang has it by default |
| `result_queue` before the event loop, or without overlap | 0.5.22 | an empty one: nothing is in flight |
| `evictable_size` with windows or states | 0.5.21 | `full_evictable_size` |
| `chunked_req_limit` | 0.5.21 | less room for the chunk while it is added |
| `_poll_timeout_aborts` | 0.5.20 | `input_blocker`, which sees requests before all ranks get them |
| `cache_salt` of an event | 0.5.20 | the `metadata` of `BlockStoredWithMetadata` |
| `beam_group` | 0.5.19 | none: there is no beam search |
| `release_req` without `server_args` | 0.5.19 | the scheduler's `server_args` |
| `cache_salt` of a request and of a page | 0.5.18 | its `extra_key`, which has the salt; events tell nothing of it |
| `get_serving`, and all of `get_parallel` | 0.5.17 | `server_args` |
| `dp_rank` and `num_dp_ranks` of `get_parallel` | 0.5.21, 0.5.22 | the scheduler's `ps`, and `dp_size` |
| `get_new_batch_prefill` with the running batch | 0.5.16 | the scheduler's `running_batch`; it returns a batch alone |
| `resolve_chat_encoding_spec` | 0.5.16 | the method of `OpenAIServingChat` |
| `process_pending_chunked_abort` | 0.5.14 | the prompt in chunks is aborted as a running request is |
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature, unwrap
from types import SimpleNamespace
from typing import Any, Final

from plait.backends.adapter.required_names import Names, RequiredNames, load

_MODULE: Final = "sglang.srt.managers.scheduler"
_SCHEDULER: Final = f"{_MODULE}.Scheduler"
_ADDER: Final = "sglang.srt.managers.schedule_policy.PrefillAdder"
_RECEIVER: Final = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
_BATCHES: Final = "sglang.srt.managers.schedule_batch"
_CONTEXT: Final = "sglang.srt.runtime_context"
_RESOLVES: Final = "sglang.srt.server_args.ServerArgs._handle_data_parallelism"
"""A version with this method keeps resolved options in ServerArgs, beside the given ones."""
_CHATS: Final = "sglang.srt.entrypoints.openai"

_REPORTS: Final = Names(
    methods={
        _SCHEDULER: ("server_args", "port_args"),
        f"{_SCHEDULER}.process_input_requests": ("recv_reqs",),
        f"{_SCHEDULER}._add_request_to_queue": ("req", "is_retracted"),
        f"{_SCHEDULER}.run_batch": ("batch",),
        f"{_SCHEDULER}.process_batch_result": ("batch", "result"),
        f"{_SCHEDULER}.abort_request": ("recv_req",),
        f"{_SCHEDULER}.get_internal_state": ("recv_req",),
        "sglang.srt.mem_cache.kv_cache_builder.build_kv_cache": (),
        "sglang.srt.managers.io_struct.GetInternalStateReq": (),
        "sglang.srt.managers.io_struct.GetInternalStateReqOutput": (),
        "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
    },
    attributes=(
        *("waiting_queue", "running_batch", "chunked_req", "last_batch", "page_size", "max_total_num_tokens"),
        *("disaggregation_mode", "token_to_kv_pool_allocator.available_size"),
        *("tree_cache.evictable_size", "tree_cache.take_events", "request_receiver.recv_requests"),
        *("tree_cache.supports_swa", "tree_cache.supports_mamba"),
        "_pending_chunked_abort_req",
    ),
    either_method=(
        {f"{_SCHEDULER}._poll_timeout_aborts": (), f"{_RECEIVER}.input_blocker": ()},
        {f"{_SCHEDULER}.process_pending_chunked_abort": (), f"{_BATCHES}.FINISH_ABORT": ()},
        {f"{_CONTEXT}.get_parallel": (), _RESOLVES: ()},
        {f"{_CONTEXT}.get_serving": (), _RESOLVES: ()},
    ),
)
_ORDER: Final = Names(
    methods={
        f"{_SCHEDULER}.get_new_batch_prefill": ("running_batch?",),
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
        f"{_BATCHES}.ScheduleBatch.release_req": ("idx", "remaing_req_count"),
        f"{_BATCHES}.ScheduleBatch.filter_batch": (),
        f"{_BATCHES}.release_req": (),
    },
    attributes=("req_to_token_pool",),
    either_method=({f"{_SCHEDULER}.get_prefill_adder_class": (), f"{_MODULE}.PrefillAdder": ()},),
)

REQUIRED: Final = RequiredNames(
    engine="SGLang",
    package="sglang",
    without_plait="Start SGLang without Plait (python -m sglang.launch_server)",
    reports=_REPORTS,
    order=_ORDER,
    chunks=_CHUNKS,
)


def complete(scheduler: Any, stock: Any) -> None:
    """Add the attributes that older versions lack. `stock` has the methods of SGLang's own scheduler."""
    overlaps = getattr(scheduler, "enable_overlap", True)
    if not hasattr(scheduler, "result_queue") and (not overlaps or _loop_names(stock, "result_queue")):
        scheduler.result_queue = deque()
    if not hasattr(stock, "process_pending_chunked_abort"):
        scheduler._pending_chunked_abort_req = None  # noqa: SLF001


def _loop_names(stock: Any, attribute: str) -> bool:
    """Whether the event loop with overlap uses an attribute by name. The loop makes it when it begins."""
    loop = getattr(stock, "event_loop_overlap", None)
    return loop is not None and attribute in unwrap(loop).__code__.co_names


def started_with(part: str, server_args: Any) -> Any:
    """The options with which SGLang was started. `part` is "serving" or "parallel"."""
    if load(f"{_CONTEXT}.get_serving") is None:
        return server_args
    return load(f"{_CONTEXT}.get_{part}")()


def rank_count(server_args: Any) -> int:
    """How many data-parallel ranks a server has. The groups of `--enable-dp-attention` are such ranks."""
    parallel = started_with("parallel", server_args)
    return int(getattr(parallel, "num_dp_ranks", None) or parallel.dp_size)


def rank_of(scheduler: Any) -> int:
    """A scheduler's data-parallel rank."""
    place = getattr(scheduler, "ps", None) or started_with("parallel", scheduler.server_args)
    return int(place.dp_rank or 0)


class TickingInput:
    """Adds the leading rank's tick to the requests of a step, before all ranks get them. `blocker` is SGLang's own."""

    def __init__(self, tick: Callable[[], Any], blocker: Any) -> None:
        self._tick = tick
        self._blocker = blocker

    def handle(self, requests: list[Any] | None) -> list[Any] | None:
        """The requests that all ranks get. Only the leading rank has requests: the others have None."""
        if self._blocker is not None:
            requests = self._blocker.handle(requests)
        tick = None if requests is None else self._tick()
        return requests if requests is None or tick is None else [*requests, tick]


def send_ticks(scheduler: Any, stock: Any, tick: Callable[[], Any]) -> None:
    """Send what `tick` returns with the requests of each step, if `_poll_timeout_aborts` does not."""
    if not hasattr(stock, "_poll_timeout_aborts"):
        receiver = scheduler.request_receiver
        scheduler.request_receiver = replace(receiver, input_blocker=TickingInput(tick, receiver.input_blocker))


def abort_in_chunks(scheduler: Any, stock: Any, asked: Any) -> None:
    """Abort the prompt in chunks if it is meant. Older versions miss a prompt that was not in the last batch."""
    request = scheduler.chunked_req
    if request is None or hasattr(stock, "process_pending_chunked_abort"):
        return
    if asked.abort_all or request.rid.startswith(asked.rid):
        request.to_finish = load(f"{_BATCHES}.FINISH_ABORT")()


def batch_of(result: Any) -> Any:
    """The batch that a prefill pass returned, None for none."""
    return getattr(result, "batch_to_run", result)


def releasing(release: Callable[..., Any], scheduler: Any) -> Callable[..., Any]:
    """SGLang's `release_req`, a function or a batch's method, without the parameter `server_args`."""
    if "server_args" in signature(release).parameters:
        return partial(release, server_args=scheduler.server_args)
    return release


def has_beams(request: Any) -> bool:
    return getattr(request, "beam_group", None) is not None


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


def evictable_tokens(tree_cache: Any) -> Any:
    """The tokens of full attention that are cached and in no running request."""
    try:
        return tree_cache.evictable_size()
    except NotImplementedError:
        return tree_cache.full_evictable_size()


def found_tokens(tree_cache: Any, request: Any) -> int:
    """How many tokens of a waiting request SGLang itself finds on the accelerator now."""
    separate = {name: getattr(request, name) for name in ("extra_key", "cache_salt") if hasattr(request, name)}
    key = load("sglang.srt.mem_cache.radix_cache.RadixKey")(
        token_ids=array("q", request.origin_input_ids[:-1]), **separate
    )
    match = tree_cache.match_prefix(load("sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams")(key=key))
    return int(match.device_prefix_len if hasattr(match, "device_prefix_len") else len(match.device_indices))


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
    """Replaces the adder's class in the scheduler's module where there is no `get_prefill_adder_class`."""

    def __init__(self, scheduler: Any, limited: Callable[[type, Any], Callable[..., Any]]) -> None:
        self._limited = limited
        self._module = None if hasattr(scheduler, "get_prefill_adder_class") else load(_MODULE)

    @contextmanager
    def limiting(self, allowed: Any) -> Iterator[None]:
        """Within this context, the scheduler's adders have the limits of `allowed`."""
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


def namespace(request: Any) -> tuple[str | None, str | None]:
    """A request's cache salt and its extra key. Requests share pages only if both are equal."""
    if hasattr(request, "cache_salt"):
        return request.cache_salt, request.extra_key
    return request.extra_key, None


def kind_of(event: Any) -> str:
    """The kind of an event: "BlockStored", "BlockRemoved" or "AllBlocksCleared"."""
    return type(event).__name__.removesuffix("WithMetadata")


def salt_of(event: Any) -> str:
    """The cache salt of pages that were stored."""
    found: str | None = getattr(event, "cache_salt", None)
    return found or getattr(getattr(event, "metadata", None), "cache_salt", None) or ""


class SaltedEvents:
    """Adds cache salts to events, for versions that have them only in the keys of the tree's nodes."""

    def __init__(self, tree_cache: Any) -> None:
        self._salts: dict[int, str] = {}
        """Salts by the `id()` of an event, from its recording until `told` gets it."""
        key = load("sglang.srt.mem_cache.radix_cache.RadixKey")
        if key is not None and "cache_salt" not in signature(key).parameters:
            core = getattr(tree_cache, "tree_core", tree_cache)
            for name in ("_record_store_event", "_record_remove_event"):
                if record := getattr(type(core), name, None):
                    setattr(core, name, partial(self._record, core, record))

    def _record(self, core: Any, record: Callable[..., None], node: Any, *args: Any, **kwargs: Any) -> None:
        before = len(core.kv_event_queue)
        record(core, node, *args, **kwargs)
        if node.key.extra_key:
            self._salts.update((id(event), node.key.extra_key) for event in core.kv_event_queue[before:])

    def told(self, events: list[Any]) -> list[Any]:
        """Events as taken from the cache. For salted pages, with the salt and with hashes that differ between salts."""
        return [_salted(event, self._salts.pop(id(event), None)) for event in events] if self._salts else events


_SALTED: Final = {name: type(name, (SimpleNamespace,), {}) for name in ("BlockStored", "BlockRemoved")}
"""Our classes for salted events. They have the names of SGLang's classes, by which `kind_of` recognises events."""


def _salted(event: Any, salt: str | None) -> Any:
    if salt is None:
        return event
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    fields["block_hashes"] = [hash((salt, key)) for key in event.block_hashes]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = hash((salt, event.parent_block_hash))
    return _SALTED[type(event).__name__](**fields, cache_salt=salt)


def chat_encoding(tokenizer_manager: Any, tool_call_parser: str | None) -> str | None:
    """SGLang's own encoding of chats for some models; None if they take the tokenizer's template."""
    find = load(f"{_CHATS}.chat_encoding.resolve_chat_encoding_spec")
    if find is not None:
        found: str | None = find(
            hf_config=tokenizer_manager.model_config.hf_config,
            tokenizer=tokenizer_manager.tokenizer,
            tool_call_parser=tool_call_parser,
        )
        return found
    find = load(f"{_CHATS}.serving_chat.OpenAIServingChat._resolve_chat_encoding_spec")
    serving = SimpleNamespace(tokenizer_manager=tokenizer_manager, tool_call_parser=tool_call_parser)
    return None if find is None else find(serving)
