"""`python -m benchmarks NAME [arguments]`: run one experiment, a module of this package; without a name, list them."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path


def names() -> dict[str, Path]:
    """The files of all experiments, by name."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {path.stem: path for path in files if not path.stem.startswith("_") and "def main(" in path.read_text()}


def main() -> int:
    """Run the named experiment as a program of its own; returns the exit status."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in names():
        print("usage: python -m benchmarks NAME [arguments]\n")
        for known, path in names().items():
            print(f"  {known:<24}{(ast.get_docstring(ast.parse(path.read_text())) or '').splitlines()[0]}")
        return 0 if name in {"", "-h", "--help"} else 2
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    status: int | None = import_module(f"benchmarks.{name}").main()  # imported: its processes have to find its classes
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
