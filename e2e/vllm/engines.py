"""Real vLLM servers as a user starts them: stock, or with Plait inside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from e2e.ports import free_ports
from e2e.real_engines.engine import (
    BATCH_TOKENS,
    KV_TOKENS,
    MAX_RUNNING_CALLS,
    MODEL,
    OWN_SCHEDULERS,
    DocumentSizes,
    EngineKind,
    RealEngine,
    Step,
)
from e2e.tiny_model import CONTEXT_TOKENS

BLOCK_TOKENS: Final = 128
"""vLLM's default on a CPU."""
KV_BLOCKS: Final = KV_TOKENS // BLOCK_TOKENS

_FLAGS: Final = (
    *("--host", "127.0.0.1"),
    *("--served-model-name", MODEL),
    # Outputs are compared token by token; in bfloat16 another order of summation may tip an argmax.
    *("--dtype", "float32"),
    *("--max-model-len", str(CONTEXT_TOKENS)),
    *("--max-num-batched-tokens", str(BATCH_TOKENS)),
    *("--max-num-seqs", str(MAX_RUNNING_CALLS)),
    *("--num-gpu-blocks-override", str(KV_BLOCKS)),
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--enforce-eager",
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
    "--enable-auto-tool-choice",  # else it refuses calls with tools
    *("--tool-call-parser", "hermes"),
)

_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

RANK_PORTS: Final = 16
"""How many ports the ranks of a server talk over, at most: vLLM takes the free ones from `VLLM_PORT` on."""

_STEP: Final = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, "
    r"(\d+) generation requests, (\d+) generation tokens"
)


class VllmServer(RealEngine):
    """A vLLM server: `command` takes the flags that all of them have."""

    annotations_field = "vllm_xargs"
    prompt_ids_option = "return_token_ids"

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name, [*command, *_FLAGS], folder, {**_ENVIRONMENT, **(environment or {})})

    def set_ranks(self, count: int) -> None:
        rpc, *others = free_ports(RANK_PORTS)
        self.add_flags(("--data-parallel-size", str(count), "--data-parallel-address", "127.0.0.1"))
        self.add_flags(("--data-parallel-rpc-port", str(rpc)))
        self.set_variable("VLLM_PORT", str(others[0]))

    def computed_prompt_tokens(self) -> float:
        return self.metric("vllm:prompt_tokens_by_source_total", source="local_compute")

    def cached_prompt_tokens(self) -> float:
        return self.metric("vllm:prompt_tokens_by_source_total", source="local_cache_hit")

    def used_blocks(self) -> int:
        return round(self.metric("vllm:kv_cache_usage_perc") * (KV_BLOCKS - 1))

    def steps(self) -> list[Step]:
        return [Step(*map(int, found.groups())) for found in _STEP.finditer(self.log())]

    def token_ids(self, choice: Mapping[str, Any]) -> Sequence[int]:
        ids: list[int] = choice["token_ids"]
        return ids

    def prompt_ids(self, answer: Mapping[str, Any]) -> Sequence[int]:
        ids: list[int] = answer["prompt_token_ids"]
        return ids


def stock_engine(name: str, python: Path, model: Path, folder: Path) -> VllmServer:
    """vLLM as it comes on a GPU, without what else is registered in its environment; not started yet."""
    command = [str(python.with_name("vllm")), "serve", str(model)]
    return VllmServer(name, command, folder, {"VLLM_PLUGINS": "asynchronous_scheduling"})


def plait_engine(
    name: str,
    python: Path,
    model: Path,
    folder: Path,
    *,
    scheduler_options: Mapping[str, int | str] | None = None,
    options: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> VllmServer:
    """vLLM with Plait inside, through Plait's launcher; see `PlaitEngine`."""
    command = [str(python.with_name("plait")), "vllm", "--name", name, *options, "--", str(model), *flags]
    if scheduler_options is None:
        return VllmServer(name, command, folder)
    command += ["--additional-config", json.dumps({"plait": {"scheduler_options": scheduler_options}})]
    return VllmServer(name, command, folder, {"PYTHONPATH": str(OWN_SCHEDULERS)})


_DOCUMENTS: Final = DocumentSizes(
    characters=9_000,  # some 2,500 tokens, several of which fit an engine that holds 16,384
    of_a_text=1,
    shared_tokens=4_500,
    output_tokens=8,
)

KIND: Final = EngineKind(
    name="vllm",
    stock=stock_engine,
    plait=plait_engine,
    distribution="vllm_cpu",
    package="vllm",
    log_steps=("--enable-logging-iteration-details",),
    long_tokens=7_900,
    overtaken_tokens=6_000,
    documents=_DOCUMENTS,
    placed_documents=_DOCUMENTS,
    agents=98,
    agent_examples=2,
    block_tokens=BLOCK_TOKENS,
    block_flags=lambda size: ("--block-size", str(size), "--num-gpu-blocks-override", str(KV_TOKENS // size)),
    kept_blocks=1,
    tells_cached="--enable-prompt-tokens-details",
    uncached="--no-enable-prefix-caching",
    embedding=("--runner", "pooling", "--convert", "embed"),
)
