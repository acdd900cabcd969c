"""Starts vLLM's servers on one GPU, or on a CPU in a rehearsal, and asks them for reports.

A and B have Plait's adapter, S is a stock one. Each runs in a session of its own, so that it outlives the command that
started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from plait.backends.protocol.cache_state import CacheState

MODEL: Final = "shape"
"""The name that the engines serve the model under."""
HOST: Final = "127.0.0.1"
TIMEOUT_S: Final = 30.0
APART_S: Final = 12.0
"""Between two starts. An engine measures the GPU's free memory while it starts."""


@dataclass(frozen=True)
class Device:
    """What engines run on, as their flags and variables. Of several attention backends, the first that works counts."""

    flags: Sequence[str]
    variables: Mapping[str, str]
    attention: Sequence[str]


DEFAULT_GRAPHS: Final = Device(
    flags=(
        *("--max-model-len", "32768", "--max-num-batched-tokens", "8192", "--max-num-seqs", "128"),
        # 12 GiB hold 98,304 tokens. Three engines of 16 GB weights fit the memory of an H200.
        *("--gpu-memory-utilization", "0.25", "--kv-cache-memory-bytes", str(12 << 30)),
    ),
    variables={"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"},
    attention=("FLASH_ATTN", "TRITON_ATTN"),
)
"""A GPU with vLLM's own CUDA graphs, which torch.compile makes: a start takes minutes."""

GPU: Final = replace(
    DEFAULT_GRAPHS,
    flags=(
        *DEFAULT_GRAPHS.flags,
        # Graphs for decodes without torch.compile: starts take seconds, TPOTs are those of the field.
        *("-cc.mode=none", "-cc.cudagraph_mode=full_decode_only"),
        "-cc.cudagraph_capture_sizes=[1,2,4,8,16,32,64,128]",
    ),
)

CPU: Final = Device(
    flags=(
        *("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--max-num-seqs", "32"),
        *("--block-size", "32", "--num-gpu-blocks-override", "161", "--enforce-eager"),
    ),
    variables={
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
    },
    attention=("",),
)

_VARIABLES: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
"""The developers' mode has the route that empties the prefix cache."""


class Engine:
    """One server, which this program need not have started: it is known by its port."""

    def __init__(self, name: str, port: int, *, is_stock: bool = False) -> None:
        self.name = name
        self.url = f"http://{HOST}:{port}"
        self._port = port
        self._is_stock = is_stock
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, device: Device, attention: str, model: Path, log: Path) -> None:
        """Start the server; does not wait for it."""
        flags = ["--host", HOST, "--port", str(self._port), "--served-model-name", MODEL, "--load-format", "dummy"]
        flags += ["--enable-prefix-caching", "--disable-uvicorn-access-log", *device.flags]
        flags += ["--attention-backend", attention] if attention else []
        if self._is_stock:
            serve = ["vllm.entrypoints.cli.main", "serve", str(model), "--enable-prompt-tokens-details"]
        else:
            serve = ["plait.gateway.cli", "vllm", "--name", self.name, "--", str(model)]
        variables = {**os.environ, **_VARIABLES, **device.variables}
        with log.open("wb") as file:
            self._process = subprocess.Popen(  # noqa: S603 - no shell, and no word of a stranger's
                [sys.executable, "-m", *serve, *flags],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=variables,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The id of a server that was started here, and of its process group."""
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it was started here and runs no more."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """End the server and its processes without warning, if it was started here."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its session's first group: all of the server's processes
            self._process.wait()

    def is_healthy(self) -> bool:
        """Whether it answers."""
        try:
            return self._get("/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def complete(self, prompt: Sequence[int], output_tokens: int) -> str:
        """The text of one completion. Raises `httpx.HTTPError`."""
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": output_tokens, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False)
        text: str = answer.raise_for_status().json()["choices"][0]["text"]
        return text

    def cache_state(self, since: CacheState | None = None) -> CacheState:
        """Its report, whole or what has changed since another one. Raises `httpx.HTTPError`."""
        query = {} if since is None else {"since": str(since.cursor), "epoch": since.epoch}
        answer = self._get("/cache_state", query).raise_for_status()
        return msgspec.json.decode(answer.content, type=CacheState)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of vLLM's own samples of this name with these labels. Raises `httpx.HTTPError`."""
        text = self._get("/metrics").raise_for_status().text
        lines = [line for line in text.splitlines(keepends=True) if line.startswith(name)]
        samples = [sample for family in text_string_to_metric_families("".join(lines)) for sample in family.samples]
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())

    def computed_prompt_tokens(self) -> float:
        """The prompt tokens that it has computed so far, by its own count."""
        return self.metric("vllm:prompt_tokens_by_source_total", source="local_compute")

    def empty_cache(self) -> None:
        """Forget all cached prefixes. Raises `httpx.HTTPError`."""
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=TIMEOUT_S, trust_env=False).raise_for_status()

    def _get(self, path: str, query: Mapping[str, str] | None = None) -> httpx.Response:
        return httpx.get(self.url + path, params=query, timeout=TIMEOUT_S, trust_env=False)


def wait_until_healthy(engines: Sequence[Engine], ends_s: float) -> str:
    """Wait until all answer; returns what prevents it: an engine that has ended, or the deadline (`time.monotonic`)."""
    waiting = list(engines)
    while waiting:
        for engine in waiting:
            if engine.has_ended:
                return f"{engine.name} has ended"
        if time.monotonic() > ends_s:
            return f"{', '.join(engine.name for engine in waiting)} did not answer in time"
        waiting = [engine for engine in waiting if not engine.is_healthy()]
        time.sleep(0.5)
    return ""
