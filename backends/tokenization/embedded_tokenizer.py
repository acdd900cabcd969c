"""The embedded engine's own tokenizer, which needs no transformers."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as Backend

from plait.backends.protocol.tokenizer_files import TEMPLATE_FILE, read_files
from plait.backends.tokenization.chatml import CHATML, EMBEDDED_FOLDER, render_by_transformers
from plait.backends.tokenization.file_tokenizer import FileTokenizer


class EmbeddedTokenizer(FileTokenizer):
    """Gives the same ids as `HuggingFaceTokenizer` does for the same files."""

    def __init__(self, chat_template: str | None = None) -> None:
        backend = Backend.from_file(str(EMBEDDED_FOLDER / "tokenizer.json"))
        settings = json.loads((EMBEDDED_FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = [value for name, value in settings.items() if name.endswith("_token") and value is not None]
        ids = frozenset(token for text in named if (token := backend.token_to_id(text)) is not None)
        super().__init__("embedded", backend, ids)
        self._own_template = chat_template or CHATML

    def files(self) -> dict[str, bytes]:
        """Those that are shipped, with the template that is used."""
        return read_files(EMBEDDED_FOLDER) | {TEMPLATE_FILE: self._own_template.encode()}

    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:  # noqa: ARG002
        return chat_template or self._own_template

    def _by_transformers(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return render_by_transformers(messages, **options)
