"""Programs of the pages run as a reader pastes them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from e2e.servers import Fleet

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_a_promised_latency_is_answered(fleet: Fleet) -> None:
    program = BLOCK.findall((DOCS / "slo.md").read_text(encoding="utf-8"))[0]
    assert "http://127.0.0.1:8000" in program
    program = program.replace("http://127.0.0.1:8000", fleet.gateway.url)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() in {"expected", "at-risk", "missed"}
