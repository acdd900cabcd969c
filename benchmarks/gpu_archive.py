"""Packs vLLM and a model for a GPU machine without a package index: `python -m benchmarks gpu_archive`.

Writes `site.tar.xz`, which unpacks to a folder for PYTHONPATH, and beside it the folder `model`, with a tokenizer and a
shape but no weights, and the recorded programs. Takes some minutes, a network, and 1 GB.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.archive import ArchiveError, build_site, compress, largest
from benchmarks.gpu.model import LLAMA_8B, write_model
from e2e.traces import METAGPT, TRACES


def main() -> int:
    """Build, and say the sizes; returns 1 if the archive cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_archive")
    parser.add_argument("--out", type=Path, default=Path(".gpu"), help="a folder (default: %(default)s)")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    _write_model(out / "model")
    _copy_traces(out / "traces")
    try:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            site = Path(folder)
            build_site(site)
            for size, name in largest(site):
                print(f"{size / 1e6:>8.1f} MB  {name}")
            packed = compress(site, out / "site.tar.xz")
    except ArchiveError as error:
        print(f"gpu_archive: {error}", file=sys.stderr)
        return 1
    others = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) - packed
    print(f"{out / 'site.tar.xz'}: {packed / 1e6:.1f} MB; beside it {others / 1e6:.1f} MB")
    return 0


def _write_model(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    write_model(folder, LLAMA_8B)


def _copy_traces(folder: Path) -> None:
    """The recorded program, if it is there; without it, the section of programs does not run."""
    if METAGPT.is_file():
        copy = folder / METAGPT.relative_to(TRACES)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(METAGPT, copy)


if __name__ == "__main__":
    sys.exit(main())
