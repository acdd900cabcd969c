"""Real vLLM servers as a user starts them: stock, or with Plait inside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx
import msgspec

from e2e.ports import free_port
from e2e.servers import DEADLINE_S, Server, eventually
from e2e.tiny_model import CONTEXT_TOKENS
from plait.backends.protocol.cache_state import CacheState

MODEL: Final = "tiny"
BLOCK_TOKENS: Final = 32
"""vLLM's CPU attention takes multiples of 32."""
KV_BLOCKS: Final = 512
KV_TOKENS: Final = KV_BLOCKS * BLOCK_TOKENS
BATCH_TOKENS: Final = 512
START_DEADLINE_S: Final = 240.0
"""Three processes that import PyTorch, one after the other: 45 s where nothing else runs."""

_FLAGS: Final = (
    *("--host", "127.0.0.1"),
    *("--served-model-name", MODEL),
    # Outputs are compared token by token; in bfloat16 another order of summation may tip an argmax.
    *("--dtype", "float32"),
    *("--max-model-len", str(CONTEXT_TOKENS)),
    *("--max-num-batched-tokens", str(BATCH_TOKENS)),
    *("--max-num-seqs", "32"),
    *("--block-size", str(BLOCK_TOKENS)),
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


class VllmServer(Server):
    """One vLLM server with its processes: `command` starts it and takes the flags that all of them have."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name, free_port(), (), folder / f"{name}.log", ready_path="/health")
        self._command = [*command, *_FLAGS, "--port", str(self.port)]
        self._environment = {**os.environ, **_ENVIRONMENT, **(environment or {})}

    def start(self) -> None:
        """Start it in a process group of its own, so that what it starts can be ended with it.

        Not in a session of its own: Linux shares the CPU out among sessions first, and vLLM's processes, which spin
        while a call runs, then starve their clients for seconds on a machine with two cores.
        """
        assert not self.running
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self.log_path.parent,
                process_group=0,
            )

    def wait_until_ready(self) -> None:
        """Return once it answers; raises `AssertionError` with its log if it ended or the deadline passed."""
        ends_s = time.monotonic() + START_DEADLINE_S
        while self.running and time.monotonic() < ends_s:
            try:
                if self.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.2)
        raise AssertionError(f"{self.name} is not ready:\n{self.log_tail(60)}")

    def kill(self) -> None:
        """End it and its workers without warning."""
        assert self._process is not None
        self._kill_group()
        self._process.wait(DEADLINE_S)

    def stop(self) -> None:
        """Stop a running server; raises `AssertionError` if it has to be killed or has logged a traceback until now."""
        failed = "Traceback" in self.log()
        self.may_log_tracebacks = True  # stock vLLM logs one when it is told to stop
        try:
            super().stop()
        finally:
            self._kill_group()
        assert not failed, f"{self.name} failed on the way:\n{self.log()}"

    def _kill_group(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def cache_state(self, **query: str | int) -> CacheState:
        """Its cache-state report."""
        response = self.get("/cache_state", params=query, headers={"accept": "application/msgpack"})
        response.raise_for_status()
        return msgspec.msgpack.decode(response.content, type=CacheState)

    def settled_state(self) -> CacheState:
        """Its whole cache state, once it runs nothing and two reports in a row agree."""
        states = [self.cache_state()]

        def is_settled() -> bool:
            states.append(self.cache_state())
            return _rests(states[-1]) and _rests(states[-2]) and states[-1].cursor == states[-2].cursor

        eventually(is_settled)
        return states[-1]

    def computed_prompt_tokens(self) -> float:
        """Prompt tokens it had to compute so far, by its own count."""
        return self.metric("vllm:prompt_tokens_by_source_total", source="local_compute")

    def cached_prompt_tokens(self) -> float:
        """Prompt tokens it found in its cache so far, by its own count."""
        return self.metric("vllm:prompt_tokens_by_source_total", source="local_cache_hit")


def _rests(state: CacheState) -> bool:
    return state.queue.running == state.queue.waiting == 0


def stored_blocks(state: CacheState) -> list[int]:
    """The blocks of a report, in its order."""
    return [block for run in state.stored for block in run.hashes]


def stock_engine(name: str, python: Path, model: Path, folder: Path) -> VllmServer:
    """vLLM as it comes, also without what Plait registers in its environment; not started yet."""
    command = [str(python.with_name("vllm")), "serve", str(model)]
    return VllmServer(name, command, folder, {"VLLM_PLUGINS": ""})


def plait_engine(
    name: str, python: Path, model: Path, folder: Path, levers: Mapping[str, int | str] | None = None
) -> VllmServer:
    """vLLM with Plait inside, through Plait's launcher; `levers` are pulled by force. Not started yet."""
    settings = {"plait": {"name": name, "levers": levers or {}}}
    command = [str(python.with_name("plait")), "vllm", "--", str(model), "--additional-config", json.dumps(settings)]
    return VllmServer(name, command, folder)
