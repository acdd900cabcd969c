"""Runs the tests of this folder on the sources of other versions of an engine, in an environment that it has.

    python -m e2e.real_schedulers.versions vllm|sglang [VERSION | newest] ...

Without a version it runs on each that has no environment of its own, and on the newest vLLM of the package index. What
is tested are the scheduler and its cache; compiled parts and dependencies stay the environment's. A version whose
sources do not import beside them is named, and counts as failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from e2e.real_engines.environment import Environment
from e2e.sglang import environment as sglang
from e2e.vllm import environment as vllm

NEWEST: Final = "newest"
HERE: Final = Path(__file__).parent
CACHE: Final = HERE.parents[1] / ".cache"


@dataclass(frozen=True)
class Versions:
    """The versions of an engine: `on_sources` have no environment of their own, `with_servers` say what runs."""

    name: str
    title: str
    on_sources: tuple[str, ...]
    with_servers: Mapping[str, str]
    environment: Environment
    its_version: str
    install: Callable[[Environment], None]
    imports: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def test(self, versions: Sequence[str]) -> int:
        """Run the tests on each version and say how each run ended. Returns 1 if one did not pass, else 0."""
        self.environment.build(self.install)
        named = [self._newest() if version == NEWEST else version for version in versions]
        results = {version: self._tested(version) for version in dict.fromkeys(named)}
        sys.stdout.write("".join(f"{self.title} {version}: {result}\n" for version, result in results.items()))
        return int(any(result != "passed" for result in results.values()))

    def table(self) -> Iterator[str]:
        """The table of the engine's page: each version, and how it is tested."""
        how = dict.fromkeys(self.on_sources, "scheduler tests on its sources")
        how |= {version: f"scheduler tests, and {servers}" for version, servers in self.with_servers.items()}
        yield f"| {self.title} | tests |"
        yield "|---|---|"
        for version in sorted(how, key=lambda version: [int(part) for part in version.split(".")]):
            yield f"| {version} | {how[version]} |"

    def _tested(self, version: str) -> str:
        """How the tests of a version ended."""
        variables = {**os.environ, **self.variables, "PYTHONPATH": str(self._sources(version))}
        imports = [str(self.environment.python), "-c", self.imports]
        tried = subprocess.run(imports, env=variables, check=False, capture_output=True, text=True)
        if tried.returncode:
            return f"does not import beside what {self.its_version} needs: {tried.stderr.strip().splitlines()[-1]}"
        command = [str(self.environment.python), "-m", "pytest", "-c", str(HERE / "pytest.ini"), str(HERE)]
        return "failed" if subprocess.run(command, env=variables, check=False).returncode else "passed"

    def _newest(self) -> str:
        listing = self._pip("index", "versions", self.name)
        found = re.search(rf"{self.name} \(([\w.]+)\)", listing)
        assert found is not None, listing
        return found[1]

    def _sources(self, version: str) -> Path:
        """The files of a version, from its wheel, without compiled ones and what describes the distribution."""
        sources = CACHE / f"{self.name}-sources"
        folder = sources / version
        if not folder.is_dir():
            sources.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=sources) as temporary:
                options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", temporary)
                self._pip("download", *options, f"{self.name}=={version}")
                (wheel,) = Path(temporary).glob("*.whl")
                with ZipFile(wheel) as archive:
                    names = [
                        name
                        for name in archive.namelist()
                        if name.startswith(f"{self.name}/") and not name.endswith(".so")
                    ]
                    archive.extractall(Path(temporary, "sources"), names)
                Path(temporary, "sources").rename(folder)
        return folder

    def _pip(self, *arguments: str) -> str:
        command = [str(self.environment.python), "-m", "pip", "--disable-pip-version-check", *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


VLLM: Final = Versions(
    "vllm",
    "vLLM",
    ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0"),
    {
        vllm.OLDEST_VLLM: "its server: `make e2e-vllm-oldest`",
        vllm.VLLM: "all tests of servers: `make e2e-vllm`",
    },
    vllm.OLDEST,
    vllm.OLDEST_VLLM,
    vllm.install_oldest,
    "import vllm.v1.core.sched.async_scheduler, vllm.v1.engine.core",
    {"VLLM_LOGGING_LEVEL": "ERROR"},
)
"""One version of each minor."""
_CONFIGS: Final = "e2e.real_schedulers.on_sglang.known_configs"
SGLANG: Final = Versions(
    "sglang",
    "SGLang",
    ("0.5.13", "0.5.14", "0.5.15", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22"),
    {sglang.SGLANG: "all tests of servers: `make e2e-sglang`"},
    sglang.ENVIRONMENT,
    sglang.SGLANG,
    sglang.install,
    f"import {_CONFIGS}, sglang.srt.managers.scheduler",
    {"SGLANG_USE_CPU_ENGINE": "1", "PYTEST_PLUGINS": _CONFIGS},
)
KINDS: Final = {kind.name: kind for kind in (VLLM, SGLANG)}


def main(arguments: Sequence[str]) -> int:
    """Run the tests of an engine, by its name, on the named versions or on all."""
    if not arguments or arguments[0] not in KINDS:
        sys.stderr.write(f"name an engine: {', '.join(KINDS)}\n")
        return 2
    kind, *versions = arguments
    everything = (*VLLM.on_sources, NEWEST) if kind == VLLM.name else SGLANG.on_sources
    return KINDS[kind].test(versions or everything)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
