"""Tokenizers from files, with the ids of `tokenizers`: Hugging Face folders as engines load them, and embedded's."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer as Backend

from plait.backends.errors import CallerError
from plait.backends.protocol.tokenizer_files import TEMPLATE_FILE, read_files, saved_files
from plait.backends.protocol.tokenizer_fingerprint import probe_texts
from plait.backends.tokenization.chat_template import (
    CHATML,
    EMBEDDED_FOLDER,
    has_transformers,
    import_transformers,
    render_as_transformers,
)
from plait.backends.tokenization.checked_encoder import CheckedEncoder, native_encode
from plait.backends.tokenization.cuts import find_cuts
from plait.backends.tokenization.kept_proof import KeptProof
from plait.backends.tokenization.tokenizer import SHORT_CHARACTERS, Tokenizer, not_unicode
from plait.backends.tokenization.vocabulary import ids_around, longest_token_bytes

# Otherwise `tokenizers` would use all cores for a batch of parts. An encoding turn may use one.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class FileTokenizer(Tokenizer):
    """A tokenizer.json. Subclasses render chats."""

    def __init__(self, name: str, backend: Backend, special_ids: frozenset[int]) -> None:
        super().__init__()
        self.name = name
        self.special_ids = special_ids
        self._backend = backend
        files = json.loads(backend.to_str())
        self.longest_token_bytes = longest_token_bytes(files)
        around = ids_around(files)
        self._knows_around = around is not None and [*around[0], *around[1]] == backend.encode("").ids
        if around is not None and self._knows_around:
            self.cuts, self.ids_around = find_cuts(files), around

    @cached_property
    def encoder(self) -> CheckedEncoder:
        """The encoder of `encode_array` and `encode_parts`, made at first use: some processes only render chats."""
        splits = self._backend.encode_special_tokens
        encoding = self._backend.to_str()
        native = native_encode(json.loads(encoding), splits_special_tokens=splits)
        encoder = CheckedEncoder(self.name, self._encode_parts, native)
        if native is not None:
            encoder.probe(probe_texts(self.vocabulary(), self.added_tokens()))
            encoder.go_on(KeptProof.of(f"{splits} {encoding}"))
        return encoder

    def prepare(self) -> None:
        """Load the encoder and try it on probe texts."""
        self.encoder  # noqa: B018 - it is kept

    @property
    def differences(self) -> int:
        return self.encoder.differences

    @property
    def short_characters(self) -> int:
        """Twice as many while the native encoder is used. One such prompt in a thousand is also compared: 12 ms."""
        return (2 if self.encoder.has_proved_itself else 1) * SHORT_CHARACTERS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a plain prompt, with the BOS and other tokens that the files require, by `tokenizers`."""
        try:
            # The same ids as by the backend's `encode`, 10 to 25 % faster without offsets. Both release the GIL.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:  # `tokenizers` raises this for a lone surrogate
            raise not_unicode() from error
        return ids

    def encode_array(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        """The same ids as unsigned 32-bit integers, in a tenth of the time if the native encoder has proved itself."""
        if add_special_tokens and not self._knows_around:
            return array("I", self.encode(text))
        ids = self.encoder.encode([text])[0]
        if add_special_tokens and self.ids_around != ((), ()):
            before, after = self.ids_around
            return array("I", [*before, *ids, *after])
        return ids

    def encode_parts(self, parts: Sequence[str]) -> list[array[int]]:
        return self.encoder.encode(parts)

    def _encode_parts(self, parts: Sequence[str]) -> list[array[int]]:
        try:
            encoded = self._backend.encode_batch_fast(list(parts), add_special_tokens=False)
        except TypeError as error:
            raise not_unicode() from error
        return [array("I", one.ids) for one in encoded]

    def vocabulary(self) -> Mapping[str, int]:
        vocabulary: Mapping[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def added_tokens(self) -> list[str]:
        return [token.content for token in self._backend.get_added_tokens_decoder().values()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids; ids that the vocabulary lacks are left out."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))


class EmbeddedTokenizer(FileTokenizer):
    """The embedded engine's own tokenizer, with the ids of `HuggingFaceTokenizer`, but without transformers."""

    def __init__(self, chat_template: str | None = None) -> None:
        backend = Backend.from_file(str(EMBEDDED_FOLDER / "tokenizer.json"))
        settings = json.loads((EMBEDDED_FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = [value for name, value in settings.items() if name.endswith("_token") and value is not None]
        ids = frozenset(token for text in named if (token := backend.token_to_id(text)) is not None)
        super().__init__("embedded", backend, ids)
        self._own_template = chat_template or CHATML

    def files(self) -> dict[str, bytes]:
        return read_files(EMBEDDED_FOLDER) | {TEMPLATE_FILE: self._own_template.encode()}

    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:  # noqa: ARG002
        return chat_template or self._own_template

    def _by_transformers(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return render_as_transformers(messages, **options)


@cache
def shipped_tokenizer() -> EmbeddedTokenizer:
    """The embedded engine's tokenizer with its own template, loaded once a process, in 0.1 s."""
    return EmbeddedTokenizer()


TEMPLATE_KWARGS_FILE: Final = "chat_template_kwargs.json"
"""The file with an engine's default template variables, in the folder of a tokenizer that the engine has offered."""


FILES: Final = ("tokenizer.json", "tekken.json", "tokenizer.model")
"""A folder has one of these; the first is preferred. Transformers converts the second with Mistral's library, the third
with SentencePiece's.
"""
_NEEDS: Final = {FILES[0]: "huggingface", FILES[1]: "mistral", FILES[2]: "sentencepiece"}
"""The extra of Plait that brings a file's library."""


def file_of(name: str, folder: Path) -> str:
    """The file that the tokenizer `name` is read from.

    Raises ValueError if the folder has none, or transformers is not installed.
    """
    file = next((file for file in FILES if (folder / file).is_file()), None)
    if file is None:
        raise ValueError(f"tokenizer {name!r}: {folder} has no {' or '.join(FILES)}")
    if not has_transformers():
        raise ValueError(f"tokenizer {name!r}: {file} needs: pip install 'plait[{_NEEDS[file]}]'")
    return file


class HuggingFaceTokenizer(FileTokenizer):
    """A folder's tokenizer.json and chat template, rendered by transformers and encoded by `tokenizers`."""

    def __init__(self, name: str, folder: Path, chat_template: str | None = None) -> None:
        file = file_of(name, folder)
        import_transformers()
        try:
            tokenizer = _tekken(folder / file) if file == FILES[1] else _auto(folder)
        except (OSError, ValueError, LookupError, ImportError) as error:
            needs = f"; {file} needs: pip install 'plait[{_NEEDS[file]}]'" if file != FILES[0] else ""
            raise ValueError(f"tokenizer {name!r} cannot be loaded from {folder}: {error}{needs}") from error
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer {name!r}: {type(tokenizer).__name__} has no fast implementation, which Plait needs"
            )
        self._tokenizer = tokenizer
        self._own_template = chat_template
        self.guesses_template = chat_template is None and tokenizer.chat_template is None
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
        """The folder's files as transformers writes them, with the template in use."""
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
        """No effect. A subclass ends its process here."""


def _auto(folder: Path) -> Any:
    """Load a folder as the engines do: some models' classes split texts differently from PreTrainedTokenizerFast."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    beside = {"mistral_format": False} if (folder / FILES[1]).is_file() else {}
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **beside)


def _tekken(file: Path) -> Any:
    """Load Mistral's file. The template is the folder's, or the one of mistral-common for the file's version."""
    import mistral_common  # noqa: F401, PLC0415 - without it there would be no template, and no error
    from tokenizers.processors import TemplateProcessing  # noqa: PLC0415
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer  # noqa: PLC0415

    tokenizer = convert_tekken_tokenizer(str(file))
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    # mistral-common puts the BOS before a plain prompt. Transformers' conversion does not.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
