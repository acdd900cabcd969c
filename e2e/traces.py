"""Where the recorded workloads are that benchmarks and some tests read. docs/traces.md says what they are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

VARIABLE: Final = "PLAIT_TRACES"

TRACES: Final = Path(os.environ.get(VARIABLE) or Path(__file__).resolve().parents[2] / "shared" / "traces")
"""The folder of the environment variable, else `shared/traces` beside the checkout."""

METAGPT: Final = TRACES / "metagpt" / "log_3_round.jsonl"

ABSENT: Final = f"the recorded workloads are not in {TRACES}: set {VARIABLE} to their folder (docs/traces.md)"
"""Why a test is skipped, or a benchmark ends."""


def checksum(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
