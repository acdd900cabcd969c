"""The situations of docs/oncall.md: `python -m e2e.oncall [NAME ...]`, all of them by default, some at a time."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from e2e.oncall.running import SILENT, SITUATIONS, run
from e2e.postgresql.server import install, stop_shared_postgres

AT_ONCE: Final = 3
ALL: Final = {**SILENT, **SITUATIONS}


def main() -> int:
    """The exit status: 1 if one is not as the page says."""
    parser = argparse.ArgumentParser(prog="python -m e2e.oncall", description=__doc__)
    parser.add_argument("name", nargs="*", choices=[[], *ALL], help=", ".join(ALL))
    parser.add_argument("--quiet-s", type=float, help="seconds of a healthy and an idle fleet (default: 300)")
    arguments = parser.parse_args()
    names = arguments.name or list(ALL)
    install()
    if len(names) == 1:
        return _one(names[0], arguments.quiet_s)
    options = () if arguments.quiet_s is None else ("--quiet-s", str(arguments.quiet_s))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return max(pool.map(lambda name: _in_a_process(name, *options), names))


def _one(name: str, quiet_s: float | None) -> int:
    begun_s = time.monotonic()
    try:
        with TemporaryDirectory(prefix="plait-oncall-") as folder:
            times = asyncio.run(run(ALL[name], Path(folder), quiet_s=quiet_s if name in SILENT else None))
    except AssertionError as failure:
        sys.stdout.write("\n".join([f"{name}: {failure}", *getattr(failure, "__notes__", ()), ""]))
        return 1
    finally:
        stop_shared_postgres()
    took_s = time.monotonic() - begun_s
    sys.stdout.write(
        f"{name}: named after {times.named_s:.0f} s, over after {times.over_s:.0f} s; took {took_s:.0f} s\n"
    )
    return 0


def _in_a_process(name: str, *options: str) -> int:
    return subprocess.run([sys.executable, "-m", "e2e.oncall", name, *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
