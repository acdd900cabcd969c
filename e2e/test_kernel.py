"""The kernel serves calls without any guest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from e2e.kernel_alone import GUESTS_ROUTES
from e2e.servers import Launcher
from tests.source_tree import ROOT
from tests.waiting import WITHIN_S


def test_the_kernel_serves_without_its_guests(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launch:
        engine = launch.engine("e")
        engine.start()
        engine.wait_until_ready()
        command = [sys.executable, "-m", "e2e.kernel_alone", engine.url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout.splitlines()[-1])
    refused = {"unknown model": 404, "too many": 429, "a wrong key": 401}
    refused |= dict.fromkeys(GUESTS_ROUTES, 404)
    assert {name: status for name, status in statuses.items() if status != 200} == refused
