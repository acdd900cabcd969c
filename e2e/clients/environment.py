"""The environments that the clients run in: `python -m e2e.clients.environment` builds what is not up to date.

The Python clients share an environment wherever their dependencies agree. Their versions are in `constraints-NAME.txt`.
To take newer versions, write one anew with `uv pip compile` from `requirements` below. The clients for Node are in
`node/`, coding agents in `agents/`, and `npm ci` installs what their lock files say. The browser for pages is Debian's
Chromium.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from e2e.clients.browser import chromium
from e2e.real_engines.environment import Environment

HERE: Final = Path(__file__).parent
NODE: Final = HERE / "node"
NODE_MODULES: Final = NODE / "node_modules"
NODE_FILES: Final = (NODE / "package.json", NODE / "package-lock.json")
AGENTS: Final = HERE / "agents"
"""Coding agents, whose programs take a gigabyte."""


@dataclass(frozen=True)
class ClientEnvironment:
    """An environment of Python clients. `replaced` gives other versions of packages than the clients ask for."""

    name: str
    requirements: Sequence[str]
    replaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> Environment:
        """Where it is, and how packages get into it."""
        return Environment(f"clients-{self.name}", [Path(__file__), self.constraints])

    @property
    def constraints(self) -> Path:
        """The file with the version of each package."""
        return HERE / f"constraints-{self.name}.txt"

    def build(self) -> None:
        """Build it, unless it is there and up to date."""
        environment = self.environment
        stamp, digest = environment.folder / ".clients-installed", _digest(environment.inputs)
        if stamp.is_file() and stamp.read_text() == digest:
            return
        shutil.rmtree(environment.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment.folder)], check=True)
        environment.install_engine(self.requirements, self.constraints, replaced=self.replaced, kept_out=())
        stamp.write_text(digest)


OPENAI_3: Final = ClientEnvironment(
    "openai-3",
    (
        "openai",
        "openai-agents",
        "anthropic",
        "langchain-openai",
        "langchain-anthropic",
        "pydantic-ai-slim[openai,anthropic]",
        "haystack-ai",
        "schemathesis",
    ),
)
OPENAI_2: Final = ClientEnvironment(
    "openai-2",
    ("openai", "instructor", "litellm[mcp]", "llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
)
"""The major before, and the clients that have not moved on from it."""
BENCHMARKS: Final = ClientEnvironment("benchmarks", ("aiperf", "guidellm"), replaced={"torch": "2.13.0+cpu"})
"""guidellm loads its data with torch. For GPUs it takes 3 GB, and this build a fifth of that."""

ENVIRONMENTS: Final = (OPENAI_3, OPENAI_2, BENCHMARKS)


def build() -> None:
    """Build all of them; the one with torch only for `make nightly`."""
    for environment in ENVIRONMENTS if "PLAIT_NIGHTLY" in os.environ else ENVIRONMENTS[:-1]:
        environment.build()
        _share_uv(environment.environment.python)
    if shutil.which("npm") is not None:
        _build_node(NODE)
        _build_node(AGENTS)
    if chromium() is None:
        _install("chromium", "tests of pages will be skipped")
    if "PLAIT_NIGHTLY" in os.environ and shutil.which("java") is None:
        _install("default-jdk-headless", "the test of the JDK's client will fail")


def _share_uv(python: Path) -> None:
    """One environment's own uv serves the others too."""
    if shutil.which("uv") is None and python.with_name("uv").exists():
        os.environ["PATH"] += f"{os.pathsep}{python.parent}"


def _build_node(folder: Path) -> None:
    files = (folder / "package.json", folder / "package-lock.json")
    stamp, digest = folder / "node_modules" / ".clients-installed", _digest(files)
    if not (stamp.is_file() and stamp.read_text() == digest):
        quiet = ("--no-audit", "--no-fund", "--loglevel", "error")
        subprocess.run(["npm", "ci", "--ignore-scripts", "--prefer-offline", *quiet], cwd=folder, check=True)
        stamp.write_text(digest)


def _install(package: str, without: str) -> None:
    """Install a package of Debian, where this may do so. `without` says what follows elsewhere."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        sys.stderr.write(f"{package} is not installed, and this may not install it: {without}\n")
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", package]):
        run = subprocess.run(["apt-get", *command], check=False, stdout=subprocess.DEVNULL, env=environment)
        if run.returncode:
            sys.stderr.write(f"apt-get {command[0]} failed: {without}\n")
            return


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


if __name__ == "__main__":
    started_s = time.monotonic()
    build()
    sys.stderr.write(f"clients' environments: {time.monotonic() - started_s:.0f} s\n")
