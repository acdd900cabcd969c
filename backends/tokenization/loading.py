"""Tokenizers by the names that configurations give them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from plait.backends.tokenization.chat_template import read_template
from plait.backends.tokenization.file_tokenizer import FILES, EmbeddedTokenizer, HuggingFaceTokenizer, shipped_tokenizer
from plait.backends.tokenization.hub import hub_folder, is_hub_name
from plait.backends.tokenization.plain_tokenizers import ByteTokenizer, EstimatedTokenizer, TiktokenTokenizer
from plait.backends.tokenization.tokenizer import Tokenizer

AUTO: Final = "auto"
"""Stands for the tokenizer of the model's engines, found when they answer; not a name for `load_tokenizer`."""

ACCEPTED_SPECS: Final = (
    "a directory with Hugging Face files (tokenizer.json, tokenizer_config.json, ...), the path of a tokenizer.json, "
    "of Mistral's tekken.json or of SentencePiece's tokenizer.model, a name on the Hugging Face hub "
    "such as 'Qwen/Qwen3-0.6B' or 'Qwen/Qwen3-0.6B@REVISION', 'tiktoken:NAME', "
    "'tiktoken:/path/to/cl100k_base.tiktoken', 'embedded', 'estimated', 'bytes'"
)

log = structlog.get_logger(__name__)


def is_to_be_downloaded(spec: str) -> bool:
    """Whether a specification names a tokenizer of the hub that is not on this machine."""
    return is_hub_name(spec) and not Path(spec).expanduser().exists() and hub_folder(spec, may_download=False) is None


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
        return shipped_tokenizer() if template is None else EmbeddedTokenizer(template)
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
