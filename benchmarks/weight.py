"""How much there is to read, to call and to import: `python -m benchmarks weight`.

Lines of each package, those of the lab apart, and of the kernel (`tests/kernel.py`), which are in several packages;
Python calls of a whole chat completion through four engines; and modules that `plait serve` has imported by then.
docs/measurements/weight.md has a row of each release.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from benchmarks.plain.counts import of_a_plain_call
from benchmarks.running.report import table
from tests.kernel import lines_of_kernel

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("gateway", "backends", "policy", "client")
LAB: Final = "lab"
COUNTED: Final = ("Python calls of a plain chat", "functions", "files", "modules of `plait serve`")


def main() -> int:
    """Print the table's row of this tree."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    lines = [lines_of(package) for package in (*PACKAGES, LAB)]
    counted = of_a_plain_call()
    row = [*lines, sum(lines[:-1]), lines_of_kernel(), counted.calls, counted.functions, counted.files, counted.modules]
    print(
        "\n".join(
            table(
                (*PACKAGES, LAB, "lines without the lab", "of the kernel", *COUNTED),
                [[f"{figure:,}" for figure in row]],
            )
        )
    )
    return 0


def lines_of(package: str) -> int:
    """The lines of its Python files, with comments and empty ones."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (ROOT / package).rglob("*.py"))
