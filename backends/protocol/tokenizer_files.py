"""`GET /plait/tokenizer`: the files of an engine's tokenizer, so that an operator need not give them to the gateway.

The answer is msgpack. The files are data: a gateway never runs an engine's code, and compares the tokenizer that it
loads from them with the fingerprint that the engine reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol

import msgspec

from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint

PATH: Final = "/plait/tokenizer"
TEMPLATE_FILE: Final = "chat_template.jinja"
NAMES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE
)  # fmt: skip
"""The names of files in an offer. Only the first must be there."""
MAX_BYTES: Final = 64 * 2**20
"""The most bytes of all files together. The largest published tokenizers have some 35 MB."""
MAX_TEMPLATE_BYTES: Final = 2**20


class Saved(Protocol):
    def save_pretrained(self, folder: str, /) -> Any: ...


class TokenizerFiles(msgspec.Struct, frozen=True):
    """An offer: each file's bytes by its name, and the fingerprint of the tokenizer that the engine uses.

    `template_kwargs` are the variables that the engine gives to every chat template.
    """

    fingerprint: TokenizerFingerprint
    files: dict[str, bytes]
    template_kwargs: dict[str, Any] = {}

    def check(self) -> None:
        """Raises ValueError for other names than `NAMES`, and for too many bytes."""
        others = sorted(self.files.keys() - set(NAMES))
        if others:
            raise ValueError(f"the offered tokenizer has files that no tokenizer has: {', '.join(others)[:200]}")
        if NAMES[0] not in self.files:
            raise ValueError(f"the offered tokenizer has no {NAMES[0]}")
        size_bytes = sum(map(len, self.files.values()))
        if size_bytes > MAX_BYTES:
            raise ValueError(f"the offered tokenizer has {size_bytes} bytes, and at most {MAX_BYTES} are taken")
        if len(self.files.get(TEMPLATE_FILE, b"")) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"the offered chat template has more than {MAX_TEMPLATE_BYTES} bytes")


def saved_files(tokenizer: Saved, chat_template: str | None = None) -> dict[str, bytes]:
    """A tokenizer's files. `chat_template` replaces the tokenizer's own template."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = read_files(Path(folder))
    return files if chat_template is None else {**files, TEMPLATE_FILE: chat_template.encode()}


def read_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder that an offer may have."""
    return {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}


def encoded(fingerprint: TokenizerFingerprint, files: Mapping[str, bytes], kwargs: Mapping[str, Any]) -> bytes:
    """An offer as msgpack. Raises ValueError for one that no gateway takes."""
    offer = TokenizerFiles(fingerprint, dict(files), dict(kwargs))
    offer.check()
    return msgspec.msgpack.encode(offer)
