"""Runs these tests on the sources of the newest vLLM on the package index, in the installed one's environment.

    PYTHON e2e/real_schedulers/on_vllm/newest.py

What is tested are the scheduler's and block pool's Python files; compiled parts and dependencies stay those of the
installed version, so that a newest version whose sources do not import beside them cannot be tested: then it says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final
from zipfile import ZipFile

HERE: Final = Path(__file__).parent
SOURCES: Final = HERE.parents[2] / ".cache" / "vllm-sources"
IMPORTS: Final = "import vllm.v1.core.sched.async_scheduler, vllm.v1.engine.core"


def main() -> int:
    newest, installed = _newest(), version("vllm").partition("+")[0]
    if newest == installed:
        sys.stdout.write(f"vLLM {installed} is the newest, and installed\n")
        return 0
    environment = {**os.environ, "PYTHONPATH": str(_sources(newest)), "VLLM_LOGGING_LEVEL": "ERROR"}
    tried = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=environment, check=False, capture_output=True, text=True
    )
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1]
        sys.stdout.write(
            f"vLLM {newest} does not import beside what {installed} needs, so it is not tested: {reason}\n"
        )
        return 0
    command = [sys.executable, "-m", "pytest", "-c", str(HERE.parent / "pytest.ini"), str(HERE.parent)]
    return subprocess.run(command, env=environment, check=False).returncode


def _newest() -> str:
    listing = _pip("index", "versions", "vllm")
    found = re.search(r"vllm \(([\w.]+)\)", listing)
    assert found is not None, listing
    return found[1]


def _sources(release: str) -> Path:
    """The Python files of a release, from its wheel."""
    folder = SOURCES / release
    if not folder.is_dir():
        SOURCES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SOURCES) as temporary:
            _pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", temporary, f"vllm=={release}")
            (wheel,) = Path(temporary).glob("*.whl")
            with ZipFile(wheel) as archive:
                archive.extractall(
                    Path(temporary, "sources"), [name for name in archive.namelist() if name.endswith(".py")]
                )
            Path(temporary, "sources").rename(folder)
    return folder


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
