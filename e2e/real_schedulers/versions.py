"""Runs the tests of this folder on the sources of other versions of vLLM, in the environment of the oldest.

    python -m e2e.real_schedulers.versions [VERSION | newest] ...

Without a version it runs on each of `MINORS` and on the newest of the package index. What is tested are the Python
files of the scheduler and the block pool, synchronous and asynchronous; compiled parts and dependencies stay the
oldest's. A version whose sources do not import beside them is named, and counts as failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from e2e.vllm.environment import OLDEST, OLDEST_VLLM, VLLM, install_oldest

MINORS: Final = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0")
"""One version of each minor that has no environment of its own."""
NEWEST: Final = "newest"
HERE: Final = Path(__file__).parent
SOURCES: Final = HERE.parents[1] / ".cache" / "vllm-sources"
IMPORTS: Final = "import vllm.v1.core.sched.async_scheduler, vllm.v1.engine.core"


def main(versions: Sequence[str]) -> int:
    """Run the tests on each version and say how each run ended. Returns 1 if one did not pass, else 0."""
    OLDEST.build(install_oldest)
    named = [_newest() if version == NEWEST else version for version in versions or (*MINORS, NEWEST)]
    results = {version: _tested(version) for version in dict.fromkeys(named)}
    sys.stdout.write("".join(f"vLLM {version}: {result}\n" for version, result in results.items()))
    return int(any(result != "passed" for result in results.values()))


def table() -> Iterator[str]:
    """The table of docs/vllm.md: each version, and how it is tested."""
    how = dict.fromkeys(MINORS, "scheduler tests on its sources: `python -m e2e.real_schedulers.versions`")
    how[OLDEST_VLLM] = "scheduler tests, and its server: `make e2e-vllm-oldest`"
    how[VLLM] = "scheduler tests, and all tests of servers: `make e2e-vllm`"
    yield "| vLLM | tests |"
    yield "|---|---|"
    for version in sorted(how, key=lambda version: [int(part) for part in version.split(".")]):
        yield f"| {version} | {how[version]} |"


def _tested(version: str) -> str:
    """How the tests of a version ended."""
    environment = {**os.environ, "PYTHONPATH": str(_sources(version)), "VLLM_LOGGING_LEVEL": "ERROR"}
    tried = subprocess.run(
        [str(OLDEST.python), "-c", IMPORTS], env=environment, check=False, capture_output=True, text=True
    )
    if tried.returncode:
        return f"does not import beside what {OLDEST_VLLM} needs: {tried.stderr.strip().splitlines()[-1]}"
    command = [str(OLDEST.python), "-m", "pytest", "-c", str(HERE / "pytest.ini"), str(HERE)]
    return "failed" if subprocess.run(command, env=environment, check=False).returncode else "passed"


def _newest() -> str:
    listing = _pip("index", "versions", "vllm")
    found = re.search(r"vllm \(([\w.]+)\)", listing)
    assert found is not None, listing
    return found[1]


def _sources(version: str) -> Path:
    """The Python files of a version, from its wheel."""
    folder = SOURCES / version
    if not folder.is_dir():
        SOURCES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SOURCES) as temporary:
            _pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", temporary, f"vllm=={version}")
            (wheel,) = Path(temporary).glob("*.whl")
            with ZipFile(wheel) as archive:
                archive.extractall(
                    Path(temporary, "sources"), [name for name in archive.namelist() if name.endswith(".py")]
                )
            Path(temporary, "sources").rename(folder)
    return folder


def _pip(*arguments: str) -> str:
    command = [str(OLDEST.python), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
