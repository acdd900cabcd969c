"""New environments, with what a user installs from the archives in `dist/`."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).parents[2]
DIST: Final = ROOT / "dist"
VERSION: Final[str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
WHEEL: Final = DIST / f"plait-{VERSION}-py3-none-any.whl"
SDIST: Final = DIST / f"plait-{VERSION}.tar.gz"

SEEDS: Final = {"pip", "setuptools"}
"""What `python -m venv` puts into each environment."""
OF_SEEDS: Final = SEEDS | {"_distutils_hack", "distutils", "pkg_resources"}
"""The entries of site-packages that are theirs, up to a dash."""


@dataclass(frozen=True, slots=True)
class NewEnvironment:
    """An environment in a folder."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Self:
        """Make one with nothing but pip."""
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        return cls(folder)

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.folder / "bin" / "python"

    @property
    def plait(self) -> Path:
        """Its `plait` command."""
        return self.folder / "bin" / "plait"

    @property
    def site(self) -> Path:
        """The folder with its packages."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        return site

    def install(self, extra: str = "") -> None:
        """Install the wheel with an extra.

        What it needs is the newest that the index has, as for a user. `.ci/run` takes the versions of
        `constraints.txt`, so that it does not depend on what others have released.
        """
        constraints = [] if "PLAIT_NIGHTLY" in os.environ else ["--constraint", str(ROOT / "constraints.txt")]
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, f"{WHEEL}[{extra}]" if extra else str(WHEEL), *constraints], check=True)

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run its Python in its own folder, isolated from the checkout."""
        command = [str(self.python), "-I", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)

    def distributions(self) -> dict[str, str]:
        """The version of each distribution, without the seeds."""
        found = {one.name.lower(): one.version for one in distributions(path=[str(self.site)])}
        return {name: version for name, version in found.items() if name not in SEEDS}

    def megabytes(self) -> float:
        """The sizes of its packages' files, bytecode included, without the seeds; of 10^6 bytes."""
        own = [entry for entry in self.site.iterdir() if entry.name.partition("-")[0] not in OF_SEEDS]
        files = [file for entry in own for file in (entry, *entry.rglob("*")) if file.is_file()]
        return sum(file.stat().st_size for file in files) / 1e6


CheckSize = Callable[[str, NewEnvironment, int], None]
"""Takes what is installed, where, and the most megabytes that it may take."""
