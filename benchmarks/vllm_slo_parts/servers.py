"""The two vLLM servers that are compared: the same model and arguments, with the stock scheduler and with ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from e2e.tiny_model import tiny_model
from e2e.vllm.engines import VllmServer
from e2e.vllm.environment import ENVIRONMENT

STOCK, OURS = "stock", "slo"

BATCH_TOKENS: Final = 2048
"""vLLM's own default for a server, but on the largest accelerators."""

FLAGS: Final = (
    *("--max-num-batched-tokens", str(BATCH_TOKENS)),
    *("--num-gpu-blocks-override", "2048"),  # 65,536 tokens: KV is never short
)
"""They come behind the end-to-end tests' own, and of an option given twice vLLM takes the last."""


class BenchServer(VllmServer):
    """A server that is started with `FLAGS`."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name, command, folder, environment)
        self._command += FLAGS

    @property
    def arguments(self) -> list[str]:
        """What its program is started with, paths left out."""
        return [argument for argument in self._command if "/" not in argument]


def is_installed() -> bool:
    """Whether the environment with vLLM has been built."""
    return (ENVIRONMENT.folder / "bin" / "vllm").exists()


def new_servers(folder: Path) -> dict[str, BenchServer]:
    """Both by name, not started yet; their logs go to `folder`."""
    programs, model = ENVIRONMENT.folder / "bin", str(tiny_model())
    stock = [str(programs / "vllm"), "serve", model]
    ours = [str(programs / "plait"), "vllm", "--scheduler", OURS, "--name", OURS, "--", model]
    return {
        STOCK: BenchServer(STOCK, stock, folder, {"VLLM_PLUGINS": ""}),
        OURS: BenchServer(OURS, ours, folder),
    }
