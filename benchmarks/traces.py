"""Whether the recorded workloads are those of docs/traces.md: `python -m benchmarks traces`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from e2e.traces import TRACES, checksum

PAGE: Final = Path(__file__).parents[1] / "docs" / "traces.md"
_ROW: Final = re.compile(r"^\| `(?P<file>[^`]+)` .* `(?P<sum>[0-9a-f]{64})` \|$", re.MULTILINE)


def main() -> int:
    """Compare, and print a line for each file; returns 1 if one is missing or another."""
    wrong = 0
    for name, expected in checksums().items():
        file = TRACES / name
        verdict = "is missing" if not file.is_file() else "is as listed" if checksum(file) == expected else "differs"
        wrong += verdict != "is as listed"
        print(f"{name} {verdict}")
    return int(wrong > 0)


def checksums() -> Mapping[str, str]:
    """The SHA-256 of each file on the page."""
    return {match["file"]: match["sum"] for match in _ROW.finditer(PAGE.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    sys.exit(main())
