"""Real SGLang servers as a user starts them: stock, or with Plait inside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

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

_FLAGS: Final = (
    *("--host", "127.0.0.1"),
    *("--served-model-name", MODEL),
    # Outputs are compared token by token; in bfloat16 another order of summation may tip an argmax.
    *("--dtype", "float32"),
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--context-length", str(CONTEXT_TOKENS)),
    *("--chunked-prefill-size", str(BATCH_TOKENS)),
    *("--max-running-requests", str(MAX_RUNNING_CALLS)),
    *("--max-total-tokens", str(KV_TOKENS)),
    *("--mem-fraction-static", "0.3"),
    *("--grammar-backend", "none"),
    "--disable-cuda-graph",
    "--sleep-on-idle",  # else each engine takes a processor all the time, and there are two
    "--enable-metrics",
    *("--tool-call-parser", "hermes"),
)

_STOCK_FLAGS: Final = ("--enable-cache-report", "--enable-mixed-chunk")
"""What Plait's launcher adds."""

_ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}

_STEP: Final = re.compile(r"Prefill batch, #new-seq: (\d+), #new-token: (\d+), .*?#running-req: (\d+)")


class SglangServer(RealEngine):
    """A SGLang server: `command` takes the flags that all of them have."""

    annotations_field = "custom_params"
    prompt_ids_option = "return_prompt_token_ids"

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name, [*command, *_FLAGS], folder, {**_ENVIRONMENT, **(environment or {})})

    def set_ranks(self, count: int) -> None:
        self.add_flags(("--dp-size", str(count)))
        self.set_variable("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(count))))  # a processor for each

    def computed_prompt_tokens(self) -> float:
        return self.metric("sglang:prompt_tokens_total") - self.cached_prompt_tokens()

    def cached_prompt_tokens(self) -> float:
        return self.metric("sglang:cached_tokens_total")

    def used_blocks(self) -> int:
        return round(self.metric("sglang:num_used_tokens"))

    def steps(self) -> list[Step]:
        found = (map(int, step.groups()) for step in _STEP.finditer(self.log()))
        return [Step(calls, tokens, decoding, 0) for calls, tokens, decoding in found]  # it logs no decoded tokens

    def token_ids(self, choice: Mapping[str, Any]) -> Sequence[int]:
        ids: list[int] = choice["token_ids"] if "token_ids" in choice else choice["response_token_ids"]
        return ids

    def prompt_ids(self, answer: Mapping[str, Any]) -> Sequence[int]:
        ids: list[int] = answer["choices"][0]["prompt_token_ids"]
        return ids


def stock_engine(name: str, python: Path, model: Path, folder: Path) -> SglangServer:
    """SGLang without the plugin that Plait registers in its environment; not started yet."""
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), *_STOCK_FLAGS]
    return SglangServer(name, command, folder, {"SGLANG_PLUGINS": "chunk_attention,emulated_device"})


def unloadable_engine(name: str, python: Path, model: Path, folder: Path, *, scheduler: str) -> SglangServer:
    """SGLang with a plugin that cannot load: there is no such local scheduler. Plait's launcher would refuse it."""
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), *_STOCK_FLAGS]
    return SglangServer(name, command, folder, {"PLAIT_SGLANG": json.dumps({"scheduler": scheduler})})


def plait_engine(
    name: str,
    python: Path,
    model: Path,
    folder: Path,
    *,
    scheduler_options: Mapping[str, int | str] | None = None,
    options: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> SglangServer:
    """SGLang with Plait inside, through Plait's launcher; see `PlaitEngine`."""
    command = [str(python.with_name("plait")), "sglang", "--name", name, *options]
    command += ["--", "--model-path", str(model), *flags]
    if scheduler_options is None:
        return SglangServer(name, command, folder)
    settings = json.dumps({"scheduler_options": scheduler_options})
    return SglangServer(name, command, folder, {"PLAIT_SGLANG": settings, "PYTHONPATH": str(OWN_SCHEDULERS)})


KIND: Final = EngineKind(
    name="sglang",
    stock=stock_engine,
    plait=plait_engine,
    distribution="sglang",
    package="sglang",
    log_steps=(),
    # On two busy cores it decodes some 100 tokens a second, so outputs are short and agents are few.
    long_tokens=2_500,
    overtaken_tokens=4_000,
    documents=DocumentSizes(characters=3_000, of_a_text=9, shared_tokens=1_600, output_tokens=2),
    placed_documents=DocumentSizes(characters=6_000, of_a_text=1, shared_tokens=2_500, output_tokens=2),
    agents=60,
    agent_examples=0,
    block_tokens=1,
    block_flags=lambda size: ("--page-size", str(size), "--chunked-prefill-size", str(-(-BATCH_TOKENS // size) * size)),
    kept_blocks=0,
    tells_cached="--enable-cache-report",
    uncached="--disable-radix-cache",
)
