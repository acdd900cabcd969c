"""How long tests wait for what has to happen: one bound for all of them, by what the machine gives to a run.

A test that waits asserts that something happens, not how soon. Where a duration is asserted, it is virtual or CPU time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Final

IDLE_S: Final = 0.15
"""A start of Python with what a small server imports, on an idle machine."""
STARTS: Final = 3
MOST: Final = 20.0


def _slowness() -> float:
    """How many times as long as on an idle machine a process takes to start, from 1 to `MOST`.

    The first process of a test run measures the starts. The processes that it starts read its figure.
    """
    measured = os.environ.get("PLAIT_TEST_SLOWNESS")
    if measured is None:
        took_s = []
        for _ in range(STARTS):
            began_s = time.monotonic()
            subprocess.run([sys.executable, "-c", "import asyncio, http.client, ssl"], check=True)
            took_s.append(time.monotonic() - began_s)
        measured = os.environ["PLAIT_TEST_SLOWNESS"] = f"{min(MOST, max(1.0, max(took_s) / IDLE_S)):.1f}"
    return float(measured)


SLOWNESS: Final = _slowness()
WITHIN_S: Final = 60.0 * SLOWNESS
"""For a process that starts, an answer, a task that ends: what has not happened by then does not happen."""
HANGS_S: Final = 600.0 * SLOWNESS
"""For a whole test with its fixtures."""
