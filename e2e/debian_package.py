"""Programs of Debian's packages, which are unpacked into `.cache` where the system does not have them.

So no service is set up, and nobody needs to be root.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class DebianPackage:
    """A package by its name."""

    name: str

    @property
    def folder(self) -> Path:
        """Where it is unpacked."""
        return ROOT / ".cache" / self.name

    def program(self, name: str) -> Path | None:
        """One of its programs: the system's, or the one that was fetched."""
        installed = shutil.which(name)
        return Path(installed) if installed else next(self.folder.glob(f"usr/*bin/{name}"), None)

    def fetch(self) -> None:
        """Download and unpack it, unless the system has a program of its name. Raises `CalledProcessError`.

        Raises SystemExit if no mirror has it.
        """
        if self.program(self.name) is not None or shutil.which("apt-get") is None:
            return
        folder = self.folder
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "lists" / "partial").mkdir(parents=True)
        own_lists = ["-o", f"Dir::State::Lists={folder / 'lists'}", "-o", f"Dir::Cache={folder}"]
        if not self._download([]):  # the machine has no lists of packages, or old ones
            subprocess.run(["apt-get", *own_lists, "-qq", "update"], check=True)
            if not self._download(own_lists):
                raise SystemExit(f"apt-get has no package called {self.name}")
        (package,) = folder.glob(f"{self.name}_*.deb")
        subprocess.run(["dpkg", "-x", package, folder], check=True)
        package.unlink()
        shutil.rmtree(folder / "lists")

    def _download(self, options: list[str]) -> bool:
        command = ["apt-get", *options, "-o", "APT::Sandbox::User=root", "-qq", "download", self.name]
        return subprocess.run(command, cwd=self.folder, check=False).returncode == 0
