"""Packs a vLLM and the gateway's dependencies for a GPU machine that reaches no package index.

The archive unpacks to a folder for PYTHONPATH. It has what `carried.txt` lists; `image_packages.txt` lists what the
machine's image has already. The compiled files of vLLM keep one GPU architecture's code, the Python packages lose what
no text model needs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.fat_binaries import pruned

FOLDER: Final = Path(__file__).parent
CARRIED: Final = FOLDER / "carried.txt"
"""The packages in the archive, with their versions. Some are newer than those of the image."""
IMAGE_PACKAGES: Final = FOLDER / "image_packages.txt"
"""The names of the packages in the machine's image, which has Python 3.12."""

PYTHON: Final = "3.12"
PLATFORMS: Final = (
    "manylinux_2_35",
    "manylinux_2_31",
    "manylinux_2_28",
    "manylinux_2_17",
    "manylinux2014",
    "manylinux1",
)
ARCHITECTURE: Final = 90
"""Hopper's."""
LIMIT_BYTES: Final = 54_000_000
"""The machine takes 64 MiB a call; the checkout and the model take the rest."""

UNNEEDED: Final = frozenset(
    (
        *("cryptography", "fastapi-cli", "fastokens", "fastsafetensors", "flashinfer-cubin", "flashinfer-python"),
        *("humming-kernels", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvtx", "outlines-core"),
        *("pynvvideocodec", "quack-kernels", "tilelang", "tokenspeed-mla", "torchcodec"),
    )
)
"""Packages that vLLM and its packages name, and import only for other models, other attention, media or tools.

Plait names fastokens, and does without it.
"""

DROPPED: Final = (
    *("*.pyi", "*.a", "bin", "mistral_common/data", "pycountry/locales", "tvm_ffi/3rdparty", "xgrammar/lib"),
    *("compressed_tensors/transform/utils/*.safetensors", "vllm/entrypoints/serve/instrumentator/static/*.js"),
    *(f"vllm/{name}" for name in ("_moe_C_*", "_flashmla_*", "_qutlass_C*", "vllm-rs", "third_party/deep_gemm")),
    *("vllm/third_party/fmha_sm100", "vllm/vllm_flash_attn/_vllm_fa2_C*"),
)
"""Files and folders of the packages that a text model on one GPU never opens, as patterns of their paths."""


class ArchiveError(Exception):
    """The archive cannot be built. The message says why."""


def build_site(site: Path) -> None:
    """Install the carried packages into the folder, and remove what is not needed. Raises ArchiveError."""
    _install(site)
    missing = sorted(_missing(site))
    if missing:
        raise ArchiveError(f"{CARRIED.name} lacks {', '.join(missing)}")
    for pattern in DROPPED:
        for path in _matching(site, pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for library in sorted((site / "vllm").rglob("*.so")):
        library.write_bytes(pruned(library.read_bytes(), ARCHITECTURE))
    libraries = [str(path) for path in site.rglob("*.so*") if path.is_file() and not path.is_relative_to(site / "vllm")]
    _run("strip", "--strip-unneeded", *libraries)
    _describe_plait(site)


def compress(site: Path, archive: Path) -> int:
    """Write the folder as a `.tar.xz`; returns its bytes. Raises ArchiveError if they are over `LIMIT_BYTES`."""
    with (
        archive.open("wb") as file,
        subprocess.Popen(["tar", "-C", str(site), "-cf", "-", "."], stdout=subprocess.PIPE) as tar,  # noqa: S603, S607
    ):
        subprocess.run(["xz", "-T2", "-6"], check=True, stdin=tar.stdout, stdout=file)  # noqa: S607
    if tar.returncode:
        raise ArchiveError(f"tar ended with {tar.returncode}")
    size = archive.stat().st_size
    if size > LIMIT_BYTES:
        raise ArchiveError(f"{archive} has {size / 1e6:.1f} MB; the limit is {LIMIT_BYTES / 1e6:.1f} MB")
    return size


def largest(site: Path, count: int = 12) -> list[tuple[int, str]]:
    """The largest packages in the folder, unpacked: bytes and name."""
    sizes = [(sum(path.stat().st_size for path in _files(entry)), entry.name) for entry in site.iterdir()]
    return sorted(sizes, reverse=True)[:count]


def _install(site: Path) -> None:
    platforms = [option for name in PLATFORMS for option in ("--platform", f"{name}_x86_64")]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--only-binary=:all:"]
    target = ["--target", str(site), "--python-version", PYTHON, "--implementation", "cp", *platforms]
    _run(sys.executable, "-m", "pip", "install", *options, *target, "--requirement", str(CARRIED))


def _missing(site: Path) -> Iterator[str]:
    """What carried packages need, and is neither carried nor in the image nor known to be unneeded."""
    distributions = list(Distribution.discover(path=[str(site)]))
    there = {canonicalize_name(one.metadata["Name"]) for one in distributions}
    known = there | set(_lines(IMAGE_PACKAGES)) | UNNEEDED
    environment = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "extra": ""}
    for one in distributions:
        for line in one.requires or ():
            required = Requirement(line)
            if required.marker is None or required.marker.evaluate(environment):
                name = canonicalize_name(required.name)
                if name not in known:
                    yield f"{name} (for {one.metadata['Name']})"


def _describe_plait(site: Path) -> None:
    """Plait runs from a checkout there, and asks for the version of its distribution."""
    folder = site / "plait-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plait\nVersion: 0\n")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)  # noqa: S603 - no shell, and no word of a stranger's


def _matching(site: Path, pattern: str) -> Sequence[Path]:
    return sorted(site.rglob(pattern) if pattern.startswith("*.") else site.glob(pattern))


def _files(entry: Path) -> list[Path]:
    return [path for path in entry.rglob("*") if path.is_file()] if entry.is_dir() else [entry]


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]
