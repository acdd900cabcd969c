"""Tokenizers by the names that configurations give them, names on the Hugging Face hub among them."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from plait.backends.protocol.tokenizer_files import NAMES
from plait.backends.tokenization.chat_template import read_template
from plait.backends.tokenization.file_tokenizer import FILES, EmbeddedTokenizer, HuggingFaceTokenizer
from plait.backends.tokenization.plain_tokenizers import ByteTokenizer, EstimatedTokenizer, TiktokenTokenizer
from plait.backends.tokenization.tokenizer import Tokenizer

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


AUTO: Final = "auto"
"""The tokenizer that the model's engines have: it is found when they answer, and is none to load."""

ACCEPTED_SPECS: Final = (
    "a directory with Hugging Face files (tokenizer.json, tokenizer_config.json, ...), the path of a tokenizer.json, "
    "of Mistral's tekken.json or of SentencePiece's tokenizer.model, a name on the Hugging Face hub "
    "such as 'Qwen/Qwen3-0.6B' or 'Qwen/Qwen3-0.6B@REVISION', 'tiktoken:NAME', "
    "'tiktoken:/path/to/cl100k_base.tiktoken', 'embedded', 'estimated', 'bytes'"
)

log = structlog.get_logger(__name__)


def load_tokenizer(spec: str, *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer that `spec` names (see ACCEPTED_SPECS). The Jinja file `chat_template` replaces its chat template.

    A `tiktoken:NAME` and a name on the hub are downloaded once. Raises ValueError that says what to provide.
    """
    template = None if chat_template is None else read_template(Path(chat_template).expanduser())
    if spec == "bytes":
        log.warning("tokens are counted as bytes: cached-token predictions will be wrong for real engines")
        return ByteTokenizer(template)
    if spec == "estimated":
        return EstimatedTokenizer(template)
    if spec == "embedded":
        return EmbeddedTokenizer(template)
    kind, _, name = spec.partition(":")
    if kind == "tiktoken" and name:
        from plait.backends.tokenization.tiktoken_encoding import load_encoding  # noqa: PLC0415 - tiktoken brings its own HTTP client

        return TiktokenTokenizer(spec, load_encoding(name), template)
    folder = Path(spec).expanduser()
    if folder.is_file() and folder.name in FILES:
        folder = folder.parent
    elif not folder.is_dir() and is_hub_name(spec):
        folder = hub_folder(spec, may_download=True) or folder
    if not folder.is_dir():
        raise ValueError(f"tokenizer {spec!r} is not a directory on this machine; give {ACCEPTED_SPECS}")
    return HuggingFaceTokenizer(spec, folder, template)
