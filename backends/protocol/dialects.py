"""One row for each kind of engine: where its annotations and token ids go, where it counts, and how it is started.

An engine with Plait's adapter names its kind in each cache-state report. Any other engine is recognised by its answers:
the owner of its models, a route that only this kind has, the names in its sizes or metrics. Engines without an adapter
get no token ids. To add an adapter, add a folder in `backends/` and a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

ChatForm = Literal["vllm", "sglang"]
"""The engine in whose form the chat template gets messages and tools."""


RANK_HEADER: Final = b"x-data-parallel-rank"
"""Names the data-parallel rank that computes a call, from 0. vLLM and SGLang answer 400 for a rank that they lack."""


class Figure(StrEnum):
    """The meaning of a sample in an engine's metrics."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_TOKENS = "kv_tokens"
    KV_BLOCKS = "kv_blocks"
    BLOCK_TOKENS = "block_tokens"
    BLOCKS_IN_LABELS = "blocks_in_labels"
    """The labels `num_gpu_blocks` and `block_size` have the size of the KV cache; that of all ranks, for each rank. Or
    `kv_cache_size_tokens` has a rank's own: what fits of calls that fill the model's context.
    """

    SLOTS = "slots"
    """Calls that the engine runs at a time."""

    LOOKED_UP = "looked_up"
    """Tokens of the prompts that were looked up in the cache."""

    PROMPT_TOKENS = "prompt_tokens"
    """Tokens of all prompts, where none is looked up if caching is off."""

    FOUND = "found"
    """Prompt tokens that were cached."""

    WORK = "work"
    """A number that changes whenever the engine computes. Counters of tokens grow at the end of a prompt, the cache's
    usage with each chunk of it.
    """


class SizesRoute(NamedTuple):
    """A route whose JSON has an engine's sizes, and their names. A dot leads into an object: `settings.n_ctx`."""

    path: str

    marks: tuple[str, ...]
    """Fields that each answer has, and no answer of another kind of engine."""

    kv_tokens: str | None = None
    """The KV cache in tokens."""

    slots: str | None = None
    """Calls that the engine runs at a time."""

    context: str | None = None
    """The longest context, in tokens; with `models`, in the entry of a model."""

    models: str | None = None
    """The list with an entry for each model that is loaded, under its `name`; None: all models have one context."""


class Launcher(NamedTuple):
    """How `plait KIND -- ARGUMENTS` starts an engine with the adapter: by `backends/KIND/launch.py`."""

    package: str
    """The engine's package, which the adapter's folder may import."""

    arguments: str
    """The name of the arguments, for usage messages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dialect:
    """One kind of engine."""

    kind: str
    title: str
    """The name for people."""

    parameters: str | None = None
    """The field of a body that takes the annotations, as extra parameters; None: there is no adapter."""

    annotates_all: bool = False
    """Whether routes other than completions and chats take that field too."""

    chat_ids: str | None = None
    """The field of a chat for the prompt's ids, which then replace the rendering of messages; None: there is none."""

    chat_form: ChatForm = "vllm"
    """The form in which the engine gives messages and tools to the chat template."""

    priority_sign: Literal[1, -1] = 1
    """1: a lower `priority` goes first, as clients mean it. -1: a higher one."""

    takes_stream_interval: bool = False
    """Whether `stream_interval` in a body sets the number of tokens in an event of the stream."""

    launcher: Launcher | None = None

    owners: frozenset[str] = frozenset()
    """Values of `owned_by` in the list of models, by which an engine is recognised."""

    routes: frozenset[str] = frozenset()
    """Routes in the engine's description by which an engine is recognised."""

    metrics: str | None = "/metrics"
    """The path of the metrics, in Prometheus' format; None: there are none."""

    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])
    """The meaning of the metrics' samples, by name: the source of an engine's counts without the adapter."""

    rank_label: str | None = None
    """The label of a sample that names its data-parallel rank."""

    loads_path: str | None = None
    """The path of a list with the load of each data-parallel rank."""

    ranked: frozenset[str] = frozenset()
    """The routes on which the engine obeys `RANK_HEADER` without the adapter."""

    slots_path: str | None = None
    """The path of a list of slots that says which are busy, for an engine started without metrics."""

    sizes: SizesRoute | None = None

    fills_context: bool = False
    """Whether the engine takes a call whose prompt and output limit exceed the context, and ends it at the context."""

    counts_in_streams: bool = False
    """Whether `continuous_usage_stats` in a body's `stream_options` puts a usage into each event."""

    budgets_thoughts: bool = False
    """Whether `thinking_token_budget` in a chat limits its thought."""

    truncates: bool = False
    """Whether the engine silently cuts a prompt that is longer than the context."""


def _by_kind(*rows: Dialect) -> Mapping[str, Dialect]:
    return MappingProxyType({row.kind: row for row in rows})


DIALECTS: Final = _by_kind(
    Dialect(
        kind="embedded",
        title="Embedded engine",
        parameters="vllm_xargs",
        annotates_all=True,
        counts_in_streams=True,
    ),
    Dialect(
        kind="vllm",
        title="vLLM",
        parameters="vllm_xargs",
        annotates_all=True,
        takes_stream_interval=True,
        counts_in_streams=True,
        budgets_thoughts=True,
        launcher=Launcher("vllm", "vllm serve arguments"),
        owners=frozenset({"vllm"}),
        figures={
            "vllm:num_requests_running": Figure.RUNNING,
            "vllm:num_requests_waiting": Figure.WAITING,
            "vllm:cache_config_info": Figure.BLOCKS_IN_LABELS,
            "vllm:prompt_tokens_total": Figure.PROMPT_TOKENS,
            "vllm:prefix_cache_queries_total": Figure.LOOKED_UP,
            "vllm:prefix_cache_hits_total": Figure.FOUND,
            "vllm:external_prefix_cache_hits_total": Figure.FOUND,
            "vllm:generation_tokens_total": Figure.WORK,
            "vllm:kv_cache_usage_perc": Figure.WORK,
            "vllm:gpu_cache_usage_perc": Figure.WORK,
        },
        rank_label="engine",
        ranked=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"}),
    ),
    Dialect(
        kind="sglang",
        title="SGLang",
        parameters="custom_params",
        chat_ids="input_ids",
        chat_form="sglang",
        priority_sign=-1,
        counts_in_streams=True,
        launcher=Launcher("sglang", "launch_server arguments"),
        owners=frozenset({"sglang"}),
        figures={
            "sglang:num_running_reqs": Figure.RUNNING,
            "sglang:num_queue_reqs": Figure.WAITING,
            "sglang:max_total_num_tokens": Figure.KV_TOKENS,
            "sglang:prompt_tokens_total": Figure.LOOKED_UP,
            "sglang:cached_tokens_total": Figure.FOUND,
            "sglang:generation_tokens_total": Figure.WORK,
            "sglang:num_used_tokens": Figure.WORK,
        },
        rank_label="dp_rank",
        loads_path="/v1/loads",
        ranked=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}),
    ),
    Dialect(
        kind="trtllm",
        title="TensorRT-LLM",
        owners=frozenset({"tensorrt_llm"}),
        routes=frozenset({"/kv_cache_events"}),
        metrics="/prometheus/metrics",
        figures={
            "trtllm_num_requests_running": Figure.RUNNING,
            "trtllm_num_requests_waiting": Figure.WAITING,
            "trtllm_kv_cache_max_blocks": Figure.KV_BLOCKS,
            "trtllm_kv_cache_tokens_per_block": Figure.BLOCK_TOKENS,
            "trtllm_max_num_active_requests": Figure.SLOTS,
            "trtllm_generation_tokens_total": Figure.WORK,
            "trtllm_kv_cache_utilization": Figure.WORK,
            "trtllm_iteration_latency_seconds": Figure.WORK,
        },
    ),
    Dialect(
        kind="llamacpp",
        title="llama.cpp",
        owners=frozenset({"llamacpp"}),
        fills_context=True,
        slots_path="/slots",
        sizes=SizesRoute(
            "/props",
            marks=("default_generation_settings", "total_slots"),
            slots="total_slots",
            context="default_generation_settings.n_ctx",
        ),
        figures={
            "llamacpp:requests_processing": Figure.RUNNING,
            "llamacpp:requests_deferred": Figure.WAITING,
            "llamacpp:prompt_tokens_total": Figure.WORK,
            "llamacpp:n_decode_total": Figure.WORK,
        },
    ),
    Dialect(
        kind="tgi",
        title="Text Generation Inference",
        figures={
            "tgi_batch_current_size": Figure.RUNNING,
            "tgi_queue_size": Figure.WAITING,
            "tgi_batch_inference_count": Figure.WORK,
        },
        sizes=SizesRoute(
            "/info",
            marks=("model_id", "max_concurrent_requests", "max_total_tokens"),
            kv_tokens="max_batch_total_tokens",
            slots="max_concurrent_requests",
            context="max_total_tokens",
        ),
    ),
    Dialect(
        kind="ollama",
        title="Ollama",
        owners=frozenset({"library"}),
        metrics=None,
        sizes=SizesRoute("/api/ps", marks=("models",), context="context_length", models="models"),
        fills_context=True,
        truncates=True,
    ),
)
"""Every kind, by its name."""

METRICS_PATHS: Final = sorted({row.metrics for row in DIALECTS.values() if row.metrics}, key="/metrics".__eq__)
"""Where an engine of an unknown kind may have metrics. `/metrics` comes last, because TensorRT-LLM's is a queue that a
reader empties.
"""

ADAPTED: Final = frozenset(kind for kind, row in DIALECTS.items() if row.parameters is not None)
"""The kinds with an adapter, which report."""
