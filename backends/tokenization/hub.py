"""Tokenizers by their names on the Hugging Face hub: from its cache on this machine, else downloaded."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Final

from plait.backends.protocol.tokenizer_files import NAMES

NAME: Final = re.compile(r"(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(?:@(?P<revision>[\w./-]{1,128}))?", re.ASCII)
"""OWNER/NAME, and a revision: a branch, a tag or a commit."""

_FILES: Final = (*NAMES, "config.json", "vocab.json", "merges.txt", "tokenizer.model", "tekken.json")
"""`config.json` says which class of tokenizer a model has."""


def is_hub_name(spec: str) -> bool:
    """Whether a name may be one of the hub's."""
    match = NAME.fullmatch(spec)
    return match is not None and not set(re.split("[/@]", spec)) & {".", ".."}


def hub_folder(spec: str, *, may_download: bool) -> Path | None:
    """The folder with a model's tokenizer, named by its commit; None if it is not in the cache and not downloaded.

    Raises ValueError if the hub does not have it, or cannot be reached.
    """
    match = NAME.fullmatch(spec)
    if match is None:
        return None
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - it brings its own HTTP client
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    snapshot = partial(
        snapshot_download, repo_id=match["repo"], revision=match["revision"], allow_patterns=list(_FILES)
    )
    try:
        folder = Path(snapshot(local_files_only=True))
        if any((folder / name).is_file() for name in _FILES if name != "config.json"):
            return folder
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        return None
    if not may_download:
        return None
    try:
        return Path(snapshot())
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"tokenizer {spec!r} is not on this machine, and the hub does not give it: {error}") from error


def pinned(spec: str, folder: Path) -> str:
    """The name with the commit that a folder of the cache has."""
    return f"{spec.partition('@')[0]}@{folder.name}"
