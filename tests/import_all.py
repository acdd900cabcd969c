"""Imports every module that is shipped: `python -m tests.import_all`.

Those that need an engine are left out, since engines have environments of their own.
"""

from __future__ import annotations

from importlib import import_module

from tests.source_tree import SHIPPED, imports, path_of, sources

ENGINES = {"vllm", "sglang", "torch"}


def main() -> None:
    """Import them. Raises what a module raises."""
    for package in SHIPPED:
        for file in sources(package):
            needs_engine = any(name.partition(".")[0] in ENGINES for name in imports(file))
            if not needs_engine:
                import_module("plait." + path_of(file).removesuffix(".py").removesuffix("/__init__").replace("/", "."))


if __name__ == "__main__":
    main()
