"""The HTTP client of Java's own library, on which others are built. It offers HTTP/2 in its first request."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from e2e.clients.matrix import Matrix
from e2e.clients.program_run import run_program
from e2e.servers import Fleet

PROGRAM = Path(__file__).parent / "programs" / "WithJdk.java"


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["HTTP_2", "HTTP_1_1"])
def test_the_jdks_client(version: str, fleets: dict[str, Fleet], matrix: Matrix, tmp_path: Path) -> None:
    java = shutil.which("java")
    assert java is not None, "no JDK is installed: run `make nightly` as root, or install one"
    outcomes = run_program([java, str(PROGRAM), version], fleets["forwarding"].gateway.url, tmp_path)
    assert len(outcomes) == 5
    assert all(one.ok for one in outcomes), outcomes
    matrix.enter(f"JDK's HttpClient, {version}", outcomes)
