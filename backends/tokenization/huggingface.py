"""Hugging Face files: a folder's tokenizer.json and chat template, as the engines load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.backends.errors import CallerError
from plait.backends.tokenization.file_tokenizer import FileTokenizer
from plait.backends.tokenization.late_transformers import import_transformers


class HuggingFaceTokenizer(FileTokenizer):
    """A folder's tokenizer.json and chat template, rendered by transformers and encoded by `tokenizers`."""

    def __init__(self, name: str, folder: Path, chat_template: str | None = None) -> None:
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"tokenizer {name!r}: {folder} has no tokenizer.json")
        import_transformers()
        # Not PreTrainedTokenizerFast: the engines use AutoTokenizer, and some models' classes split text differently.
        from transformers import AutoTokenizer  # noqa: PLC0415

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"tokenizer {name!r} cannot be loaded from {folder}: {error}") from error
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer {name!r}: {type(tokenizer).__name__} has no fast implementation, which Plait needs"
            )
        self._tokenizer = tokenizer
        self._own_template = chat_template
        backend = tokenizer.backend_tokenizer
        # The file may set truncation and padding. transformers, and so the engines, undo them for a prompt.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        super().__init__(name, backend, frozenset(tokenizer.all_special_ids))

    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:
        chosen = chat_template or self._own_template
        if chosen is None and self._tokenizer.chat_template is None:
            raise CallerError(
                "The model has no chat template. Use /v1/completions, or set a chat template.", param="messages"
            )
        return str(self._tokenizer.get_chat_template(chosen, tools=tools))

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
