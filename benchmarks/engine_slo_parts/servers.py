"""The two real servers that are compared: the same model and arguments, with the stock scheduler and with ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.engine_slo_parts.workload import Shape
from e2e.real_engines.engine import EngineKind, RealEngine
from e2e.real_engines.environment import Environment
from e2e.sglang import engines as sglang
from e2e.sglang.environment import ENVIRONMENT as SGLANG_ENVIRONMENT
from e2e.sglang.environment import SGLANG
from e2e.tiny_model import tiny_model
from e2e.vllm import engines as vllm
from e2e.vllm.environment import ENVIRONMENT as VLLM_ENVIRONMENT
from e2e.vllm.environment import VLLM

STOCK, OURS = "stock", "slo"


@dataclass(frozen=True)
class Engine:
    """An engine to measure. Of a flag given twice it takes the last, so `flags` replace those of the tests."""

    kind: EngineKind
    environment: Environment
    title: str
    flags: Sequence[str]
    shape: Shape
    ahead: int
    """How many iterations it plans while one is computed."""

    @property
    def is_installed(self) -> bool:
        """Whether its environment has been built."""
        return self.environment.python.exists()


KV_TOKENS: Final = 65_536
"""KV is never short."""
BATCH_TOKENS: Final = 2048
"""vLLM's own default for a server, but on the largest accelerators."""

ENGINES: Final = {
    "vllm": Engine(
        vllm.KIND,
        VLLM_ENVIRONMENT,
        f"vLLM {VLLM}",
        flags=("--max-num-batched-tokens", str(BATCH_TOKENS), "--num-gpu-blocks-override", str(KV_TOKENS // 32)),
        shape=Shape(),
        ahead=1,
    ),
    "sglang": Engine(
        sglang.KIND,
        SGLANG_ENVIRONMENT,
        f"SGLang {SGLANG}",
        # vLLM's chunk. SGLang's own default is the same on accelerators of up to 20 GB, and longer on others.
        # Without an accelerator, a forward pass blocks the scheduler: overlapped, results wait for the next step's end.
        flags=(
            *("--chunked-prefill-size", str(BATCH_TOKENS), "--max-total-tokens", str(KV_TOKENS)),
            "--disable-overlap-schedule",
        ),
        shape=Shape(),
        ahead=0,
    ),
}


def new_servers(engine: Engine, folder: Path, emulated: str | None = None) -> dict[str, RealEngine]:
    """Both by name, not started yet; their logs go to `folder`. Forward passes are emulated by the profile, if any."""
    python, model = engine.environment.python, tiny_model()
    servers = {
        STOCK: engine.kind.stock(STOCK, python, model, folder),
        OURS: engine.kind.plait(OURS, python, model, folder, options=("--scheduler", OURS)),
    }
    for server in servers.values():
        server.add_flags(engine.flags)
        if emulated is not None:
            server.set_variable("PLAIT_EMULATED_DEVICE", emulated)
    return servers


def arguments_of(server: RealEngine) -> list[str]:
    """What a server's program is started with, paths left out."""
    return [argument for argument in server.command if "/" not in argument]
