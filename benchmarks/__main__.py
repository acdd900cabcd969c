"""`python -m benchmarks NAME [arguments]`: run one experiment, a module of this package; without a name, list them."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path


def main() -> int:
    """Run the named experiment as a program of its own; returns the exit status."""
    names = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.py")) if not path.stem.startswith("_")}
    name, *arguments = sys.argv[1:] or [""]
    if name not in names:
        print("usage: python -m benchmarks NAME [arguments]\n")
        for known, path in names.items():
            print(f"  {known:<24}{(ast.get_docstring(ast.parse(path.read_text())) or '').splitlines()[0]}")
        return 0 if name in {"", "-h", "--help"} else 2
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
