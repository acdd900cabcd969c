"""The environment of real SGLang: `.venv-sglang`. `python -m e2e.sglang.environment` builds it if it is not up to date.

SGLang's wheel is for GPUs. Its CPU path needs few of its dependencies, and stand-ins (`cpu_stand_ins`): for what it
imports and does not call, and for attention, whose plain version costs a chunk the square of the whole context. No file
of SGLang is changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from e2e.real_engines.environment import Environment

CONSTRAINTS: Final = Path(__file__).with_name("constraints.txt")
STAND_INS: Final = Path(__file__).with_name("cpu_stand_ins")
ENVIRONMENT: Final = Environment("sglang", (Path(__file__), CONSTRAINTS, *sorted(STAND_INS.glob("*.[pt]*"))))

SGLANG: Final = "0.5.23"
TOOLS: Final = ("pytest", "dill")
"""pytest is for tests of the plugin on SGLang's own classes. SGLang imports dill, which comes with what is left out."""
REPLACED: Final = {"torch": "2.13.0", "torchvision": "0.28.0", "triton": "3.4.0"}
"""SGLang asks for versions whose wheels are for GPUs. triton is imported, and 3.2 fails there."""
KEPT_OUT: Final = (
    *("blobfile", "cuda-python", "datasets", "decord2", "deepseek-recipe", "easydict", "flash-attn-4"),
    *("flashinfer_python", "humming-kernels", "kernels", "mistral_common", "modelscope", "nvidia-cutlass-dsl"),
    *("nvidia-mathdx", "nvidia-ml-py", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm"),
    *("sgl-flash-mla", "sglang-kernel", "smg-grpc-servicer", "tilelang", "timm", "tml-renderers"),
    *("torch_memory_saver", "torchaudio", "torchcodec"),
)
"""Kernels for GPUs, and what only other models or other front ends need."""


def install(environment: Environment) -> None:
    """Install SGLang with the stand-ins."""
    environment.install_engine(
        (f"sglang[tracing]=={SGLANG}", *TOOLS), CONSTRAINTS, replaced=REPLACED, kept_out=KEPT_OUT
    )
    environment.install(str(STAND_INS))


if __name__ == "__main__":
    ENVIRONMENT.build(install)
