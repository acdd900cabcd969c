"""Builds the Python environment that a real engine runs in on a machine without an accelerator: `.venv-NAME`.

The engine comes from the package index with its own dependencies. Plait itself is installed into it as a user would,
but editable, so that its entry points are registered. Nothing but the environment's version of Python has to be there;
where packages come from is pip's configuration.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

_INDEX_OPTIONS: Final = ("index-url", "extra-index-url", "find-links", "trusted-host")
"""What uv calls by pip's name, but for `trusted-host`, which is `allow-insecure-host` there."""


@dataclass(frozen=True)
class Environment:
    """The environment `name` of an engine. `inputs` are the files that say what is in it."""

    name: str
    inputs: Sequence[Path]
    version: str = "3.11"
    """Python's: the newest engines' wheels for a CPU are for this version only."""

    @property
    def folder(self) -> Path:
        """Where it is."""
        return ROOT / f".venv-{self.name}"

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.folder / "bin" / "python"

    def build(self, install_engine: Callable[[Environment], None]) -> None:
        """Build what is missing or out of date."""
        inputs = [Path(__file__), *self.inputs]
        engine = _Stamp(self.folder / ".engine-installed", inputs)
        if not engine.holds:
            shutil.rmtree(self.folder, ignore_errors=True)
            _run([_python(self.version), "-m", "venv", str(self.folder)])
            install_engine(self)
            engine.set()
        plait = _Stamp(self.folder / ".plait-installed", [*inputs, ROOT / "pyproject.toml"])
        if not plait.holds:
            self.install("--editable", str(ROOT))
            plait.set()

    def install_engine(
        self, requirements: Sequence[str], constraints: Path, *, replaced: Mapping[str, str], kept_out: Sequence[str]
    ) -> None:
        """Install packages. `replaced` gives other versions than they ask for, `kept_out` are not installed."""
        overrides = self.folder / "overrides.txt"
        lines = [f"{name}=={version}" for name, version in replaced.items()]
        lines += [f"{name} ; sys_platform == 'never'" for name in kept_out]
        overrides.write_text("".join(f"{line}\n" for line in lines))
        options = ["--constraints", str(constraints), "--overrides", str(overrides)]
        self.install(*requirements, *options, "--compile-bytecode")  # engines start in half the time

    def install(self, *arguments: str) -> None:
        """`uv pip install` with what pip is configured to install from; every index counts alike, as with pip."""
        options, environment = ["--index-strategy", "unsafe-best-match"], dict(os.environ)
        for key, values in _pip_settings(self.python).items():
            if key == "cert":
                environment.setdefault("SSL_CERT_FILE", values[-1])
            elif key in _INDEX_OPTIONS:
                option = "allow-insecure-host" if key == "trusted-host" else key
                chosen = values[-1:] if key == "index-url" else values
                options += [argument for value in chosen for argument in (f"--{option}", value)]
            elif key == "no-index" and values[-1].lower() in {"1", "true", "yes", "on"}:
                options.append("--no-index")
        _run(
            [_uv(self.python), "pip", "install", "--quiet", "--python", str(self.python), *options, *arguments],
            environment,
        )


class _Stamp:
    """Says whether a step was done with the present content of its inputs; a rebuilt environment has no stamps."""

    def __init__(self, path: Path, inputs: Sequence[Path]) -> None:
        self._path = path
        self._digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs)).hexdigest()

    @property
    def holds(self) -> bool:
        return self._path.is_file() and self._path.read_text() == self._digest

    def set(self) -> None:
        self._path.write_text(self._digest)


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


def _python(version: str) -> str:
    """A Python of a version: this one, the command `pythonVERSION`, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    if ".".join(platform.python_version_tuple()[:2]) == version:
        candidates.insert(0, sys.executable)
    for candidate in filter(shutil.which, candidates):
        # pyenv has a command for each of its versions, which fails while another version is chosen.
        if subprocess.run([candidate, "-c", ""], check=False, capture_output=True).returncode == 0:
            return candidate
    raise SystemExit(f"this environment needs Python {version}: install it first")


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    sys.stderr.write(f"{' '.join(command)}\n")
    subprocess.run(command, check=True, env=environment)
