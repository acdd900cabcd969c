"""Downloads from the Hugging Face hub in a process of its own, which can be killed at any time.

The hub's library waits and retries for minutes, in threads that cannot be stopped.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

from plait.backends.tokenization.hub import hub_folder


async def download(name: str) -> Path:
    """The folder with a model's tokenizer in the hub's cache on this machine, filled if it was not there.

    Raises ValueError if the hub does not have it, or cannot be reached. Cancelled, it leaves no process behind.
    """
    command = sys.executable, "-m", __name__, name
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = said.decode(errors="replace").strip()
    if process.returncode:
        raise ValueError(text or f"the download of tokenizer {name!r} ended with status {process.returncode}")
    return Path(text)


def main(name: str) -> int:
    """Print the folder, or in one line why there is none; returns the exit status."""
    try:
        folder = hub_folder(name, may_download=True)
    except ValueError as error:
        sys.stdout.write(" ".join(str(error).split()))
        return 1
    sys.stdout.write(str(folder or f"tokenizer {name!r} is no name of the hub"))
    return 0 if folder else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
