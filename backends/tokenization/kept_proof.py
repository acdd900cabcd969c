"""How many prompts a native encoder has encoded as `tokenizers` does, over all processes of this machine.

The count is for one `tokenizer.json`, the versions of both libraries and the kind of machine. A file keeps it, so that
a worker which starts does not encode its first prompts twice again. See docs/design/native-encoder.md.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from plait.backends.tokenization.cache_folder import cache_folder

FOLDER: Final = "proved"
LIBRARIES: Final = ("fastokens", "tokenizers")


class KeptProof:
    """The count in one file. A file that cannot be read counts as 0, one that cannot be written stays as it is."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @classmethod
    def of(cls, encoding: str) -> KeptProof:
        """The proof for the text of a `tokenizer.json`."""
        versions = "\n".join(f"{name} {_version(name)}" for name in LIBRARIES)
        digest = sha256(f"{versions}\n{platform.machine()}\n{encoding}".encode()).hexdigest()
        return cls(cache_folder(FOLDER) / digest)

    def prompts(self) -> int:
        with suppress(OSError, ValueError):
            return max(0, int(self._file.read_text()))
        return 0

    def add(self, prompts: int) -> int:
        """Count so many more, and return the sum. What other processes add in the same instant may be lost."""
        total = self.prompts() + prompts
        self._write(total)
        return total

    def clear(self) -> None:
        self._write(0)

    def _write(self, prompts: int) -> None:
        new = self._file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            new.write_text(str(prompts))
            new.replace(self._file)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
