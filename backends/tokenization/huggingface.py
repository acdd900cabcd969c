"""Hugging Face files: a folder's tokenizer.json and chat template, as the engines load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from plait.backends.errors import CallerError
from plait.backends.protocol.tokenizer_files import saved_files
from plait.backends.tokenization.file_tokenizer import FileTokenizer
from plait.backends.tokenization.late_transformers import import_transformers

TEMPLATE_KWARGS_FILE: Final = "chat_template_kwargs.json"
"""What the template gets by default, beside the files of a tokenizer that an engine has offered."""


FILES: Final = ("tokenizer.json", "tekken.json", "tokenizer.model")
"""A folder has one of these; the first is preferred. The second is Mistral's and the third SentencePiece's.

Transformers converts both, with those libraries.
"""
_NEEDS: Final = {FILES[1]: "mistral", FILES[2]: "sentencepiece"}
"""The extra of Plait that brings a file's library."""


class HuggingFaceTokenizer(FileTokenizer):
    """A folder's tokenizer.json and chat template, rendered by transformers and encoded by `tokenizers`."""

    def __init__(self, name: str, folder: Path, chat_template: str | None = None) -> None:
        file = next((file for file in FILES if (folder / file).is_file()), None)
        if file is None:
            raise ValueError(f"tokenizer {name!r}: {folder} has no {' or '.join(FILES)}")
        import_transformers()
        try:
            tokenizer = _tekken(folder / file) if file == FILES[1] else _auto(folder)
        except (OSError, ValueError, LookupError, ImportError) as error:
            needs = f"; {file} needs: pip install 'plait[{_NEEDS[file]}]'" if file in _NEEDS else ""
            raise ValueError(f"tokenizer {name!r} cannot be loaded from {folder}: {error}{needs}") from error
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer {name!r}: {type(tokenizer).__name__} has no fast implementation, which Plait needs"
            )
        self._tokenizer = tokenizer
        self._own_template = chat_template
        defaults = folder / TEMPLATE_KWARGS_FILE
        self._template_kwargs = _json_object(defaults) if defaults.is_file() else {}
        self._variables = {**tokenizer.special_tokens_map, **self._template_kwargs}
        backend = tokenizer.backend_tokenizer
        # The file may set truncation and padding. transformers, and so the engines, undo them for a prompt.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        super().__init__(name, backend, frozenset(tokenizer.all_special_ids))

    def files(self) -> dict[str, bytes]:
        """Those of the folder as transformers writes them, with the template that is used."""
        return saved_files(self._tokenizer, self._own_template)

    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:
        chosen = chat_template or self._own_template
        if chosen is None and self._tokenizer.chat_template is None:
            raise CallerError(
                "The model has no chat template. Use /v1/completions, or set a chat template.", param="messages"
            )
        return str(self._tokenizer.get_chat_template(chosen, tools=tools))

    def _by_transformers(self, messages: list[dict[str, Any]], **options: Any) -> str:
        given = {**self._template_kwargs, **options}
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **given))

    def close(self) -> None:
        """End what rendering has started, which is nothing here."""


def _auto(folder: Path) -> Any:
    """As the engines load a folder: some models' classes split texts in another way than PreTrainedTokenizerFast."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    beside = {"mistral_format": False} if (folder / FILES[1]).is_file() else {}
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **beside)


def _tekken(file: Path) -> Any:
    """Mistral's file. Its template is the folder's, or the one that mistral-common writes for the file's version."""
    import mistral_common  # noqa: F401, PLC0415 - without it there would be no template, and no error
    from tokenizers.processors import TemplateProcessing  # noqa: PLC0415
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer  # noqa: PLC0415

    tokenizer = convert_tekken_tokenizer(str(file))
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    # mistral-common puts it before a plain prompt. Transformers' conversion does not.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
