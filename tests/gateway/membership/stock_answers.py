"""What engines of each kind answer without the adapter, and what is to be read out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from plait.backends.protocol.engine_counts import EngineCounts, EngineSizes

Answers = dict[str, bytes]
"""By path. An engine has no other routes."""


def models(owner: str, **more: int) -> bytes:
    fields = "".join(f',"{name}":{value}' for name, value in more.items())
    return b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"%b"%b}]}' % (
        owner.encode(),
        fields.encode(),
    )


VLLM: Final = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",x="None"} 1.0
"""
SGLANG: Final = b"""sglang:num_running_reqs{model_name="m",tp_rank="0"} 1.2e+01
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 0.0
sglang:max_total_num_tokens{model_name="m"} 42000.0
"""
TRTLLM: Final = b"""# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 6.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 2.0
trtllm_max_num_active_requests{engine_type="trtllm",model_name="m"} 64.0
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 1000.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32.0
trtllm_iteration_latency_seconds{engine_type="trtllm",model_name="m"} 0.5
"""
LLAMACPP: Final = b"""llamacpp:prompt_tokens_total 1500
llamacpp:n_decode_total 30
llamacpp:requests_processing 1
llamacpp:requests_deferred 0
"""
TGI: Final = b"""# TYPE tgi_batch_inference_count counter
tgi_batch_inference_count{method="prefill"} 4
tgi_batch_inference_count{method="decode"} 40
tgi_batch_current_size 7
tgi_queue_size 3
"""

PROPS: Final = b'{"default_generation_settings":{"n_ctx":8192,"params":{}},"total_slots":4,"model_path":"/m.gguf"}'
INFO: Final = (
    b'{"model_id":"org/m","max_concurrent_requests":128,"max_input_tokens":4095,"max_total_tokens":4096,'
    b'"max_batch_total_tokens":65536,"router":"text-generation-router","version":"2.4.0"}'
)
PS: Final = b'{"models":[{"name":"m","model":"m","size":8372905984,"context_length":16384}]}'


@dataclass(frozen=True)
class Stock:
    """An engine of a kind: its answers, and what they say."""

    kind: str
    answers: Answers
    counts: EngineCounts | None
    sizes: EngineSizes = EngineSizes()  # noqa: RUF009 - it is frozen
    slots: int = 0
    """What the gateway takes as the calls that run at a time; 0: it does not know."""

    kv_tokens: int | None = None


STOCK: Final = {
    "vllm": Stock(
        "vllm",
        {"/v1/models": models("vllm", max_model_len=32768), "/metrics": VLLM},
        EngineCounts(5, 1, 16_000, 0.25),
        slots=5,
        kv_tokens=16_000,
    ),
    "sglang": Stock(
        "sglang",
        {"/v1/models": models("sglang", max_model_len=32768), "/metrics": SGLANG},
        EngineCounts(12, 0, 42_000),
        kv_tokens=42_000,
    ),
    "TensorRT-LLM": Stock(
        "trtllm",
        {"/v1/models": models("tensorrt_llm"), "/prometheus/metrics": TRTLLM, "/metrics": b"[]"},
        EngineCounts(6, 2, 32_000, 0.5, 64),
        slots=6,
        kv_tokens=32_000,
    ),
    "TensorRT-LLM without iteration stats": Stock(
        "trtllm", {"/v1/models": models("tensorrt_llm"), "/metrics": b"[]"}, None
    ),
    "llama.cpp": Stock(
        "llamacpp",
        {"/v1/models": models("llamacpp"), "/metrics": LLAMACPP, "/props": PROPS, "/slots": b"[]"},
        EngineCounts(1, 0, None, 1_530.0),
        EngineSizes(None, 4, 8_192),
        slots=4,
    ),
    "llama.cpp without --metrics": Stock(
        "llamacpp",
        {
            "/v1/models": models("llamacpp"),
            "/props": PROPS,
            "/slots": b'[{"id":0,"is_processing":true,"n_ctx":8192},{"id":1,"is_processing":false}]',
        },
        EngineCounts(1, None, None, slots=2),
        EngineSizes(None, 4, 8_192),
        slots=2,
    ),
    "TGI": Stock(
        "tgi",
        {"/v1/models": models("org/m"), "/metrics": TGI, "/info": INFO},
        EngineCounts(7, 3, None, 44.0),
        EngineSizes(65_536, 128, 4_096),
        slots=7,
        kv_tokens=65_536,
    ),
    "Ollama": Stock(
        "ollama",
        {"/v1/models": models("library"), "/api/ps": PS},
        None,
        EngineSizes(contexts={"m": 16_384}),
    ),
    "Ollama, a model of a user": Stock("ollama", {"/v1/models": models("somebody"), "/api/ps": b'{"models":[]}'}, None),
}
