"""Runs the tests of this folder on the sources of older versions of SGLang, in the environment of the newest.

    python -m e2e.real_schedulers.sglang_versions [VERSION] ...

Without a version it runs on each of `OLDER`. Compiled parts and dependencies stay the newest's. A version whose sources
do not import beside them is named, and counts as failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from e2e.sglang.environment import ENVIRONMENT, install

OLDER: Final = ("0.5.20", "0.5.21")
HERE: Final = Path(__file__).parent
SOURCES: Final = HERE.parents[1] / ".cache" / "sglang-sources"


def main(versions: Sequence[str]) -> int:
    """Run the tests on each version and say how each run ended. Returns 1 if one did not pass, else 0."""
    ENVIRONMENT.build(install)
    results = {version: _tested(version) for version in versions or OLDER}
    sys.stdout.write("".join(f"SGLang {version}: {result}\n" for version, result in results.items()))
    return int(any(result != "passed" for result in results.values()))


def _tested(version: str) -> str:
    """How the tests of a version ended."""
    environment = {**os.environ, "PYTHONPATH": str(_sources(version)), "SGLANG_USE_CPU_ENGINE": "1"}
    imports = [str(ENVIRONMENT.python), "-c", "import sglang.srt.managers.scheduler"]
    tried = subprocess.run(imports, env=environment, check=False, capture_output=True, text=True)
    if tried.returncode:
        return f"does not import beside what the newest needs: {tried.stderr.strip().splitlines()[-1]}"
    command = [str(ENVIRONMENT.python), "-m", "pytest", "-c", str(HERE / "pytest.ini"), str(HERE)]
    return "failed" if subprocess.run(command, env=environment, check=False).returncode else "passed"


def _sources(version: str) -> Path:
    """The files of a version, from its wheel. SGLang looks for some that are no Python."""
    folder = SOURCES / version
    if not folder.is_dir():
        SOURCES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SOURCES) as temporary:
            options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", temporary)
            command = [str(ENVIRONMENT.python), "-m", "pip", "--disable-pip-version-check", "download", *options]
            subprocess.run([*command, f"sglang=={version}"], check=True)
            (wheel,) = Path(temporary).glob("*.whl")
            with ZipFile(wheel) as archive:
                archive.extractall(Path(temporary, "sources"))
            Path(temporary, "sources").rename(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
