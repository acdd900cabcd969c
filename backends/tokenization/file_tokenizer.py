"""Tokenizers of files, encoded by `tokenizers`: Hugging Face folders as engines load them, and the embedded one."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer as Backend

from plait.backends.errors import CallerError
from plait.backends.protocol.tokenizer_files import TEMPLATE_FILE, read_files, saved_files
from plait.backends.tokenization.chat_template import (
    CHATML,
    EMBEDDED_FOLDER,
    import_transformers,
    render_by_transformers,
)
from plait.backends.tokenization.cuts import PLAIN_WORD, find_cuts
from plait.backends.tokenization.tokenizer import ChatTokenizer, not_unicode
from plait.backends.tokenization.vocabulary import ids_around, longest_token_bytes

# Parts are encoded in batches, for which `tokenizers` would take all cores. A turn has one.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


COMMON_WORDS: Final = 8_192
"""Words of the vocabulary that are encoded beforehand, in some 40 ms. They take some 1.5 MB. Twice as many would save a
new gateway an eighth of the words that it encodes for its first 300 short prompts."""

_WORD: Final = re.compile(r"[\u0120\u2581]?[0-9A-Za-z]+[,.]?")
"""A token that may be a word. Vocabularies write the space before it as one of these characters."""


_SPACE: Final = "\u0120"
"""How byte-level vocabularies write a space."""

PLAIN_WORDS: Final = 64
"""Of which the merges are asked one by one, in some 0.1 ms. For more parts, the interpreter's lock is freed."""

_ID: Final = attrgetter("id")


class FileTokenizer(ChatTokenizer):
    """A tokenizer.json. How chats are rendered is left to its kinds."""

    def __init__(self, name: str, backend: Backend, special_ids: frozenset[int]) -> None:
        super().__init__()
        self.name = name
        self.special_ids = special_ids
        self._backend, self._merges = backend, backend.model
        files = json.loads(backend.to_str())
        self.longest_token_bytes = longest_token_bytes(files)
        around = ids_around(files)
        if around is not None and [*around[0], *around[1]] == backend.encode("").ids:
            self.cuts, self.ids_around = find_cuts(files), around

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a plain prompt, with the BOS and other tokens that the files require."""
        try:
            # The same ids as `encode`, 10 to 25 % faster, because it keeps no offsets. Both release the GIL.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:  # `tokenizers` raises this for a lone surrogate
            raise not_unicode() from error
        return ids

    def encode_parts(self, parts: Sequence[str]) -> list[array[int]]:
        """The ids of each part, without other tokens."""
        ids = list(map(self._of_plain_word, parts)) if len(parts) <= PLAIN_WORDS else [None] * len(parts)
        others = [part for part, of_part in zip(parts, ids, strict=True) if of_part is None]
        try:
            encoded = iter(self._backend.encode_batch_fast(others, add_special_tokens=False) if others else ())
        except TypeError as error:
            raise not_unicode() from error
        return [array("I", next(encoded).ids) if of_part is None else of_part for of_part in ids]

    def _of_plain_word(self, part: str) -> array[int] | None:
        """The ids that the merges give, without the search for added tokens and the pattern; None for other parts."""
        pieces = None if self.cuts is None else self.cuts.pieces
        if pieces is None or not PLAIN_WORD.fullmatch(part):
            return None
        ids = array("I")
        for piece in pieces.findall(part):
            ids.extend(map(_ID, self._merges.tokenize(piece.replace(" ", _SPACE))))
        return ids

    def vocabulary(self) -> Mapping[str, int]:
        """All tokens with their ids."""
        vocabulary: Mapping[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    @cached_property
    def common_words(self) -> Mapping[str, bytes]:
        """The ids of the vocabulary's first words, as bytes of an array."""
        vocabulary = self.vocabulary()
        tokens = filter(_WORD.fullmatch, sorted(vocabulary, key=vocabulary.__getitem__))
        words = [token.replace("\u0120", " ").replace("\u2581", " ") for token in islice(tokens, COMMON_WORDS)]
        return dict(zip(words, map(array.tobytes, self.encode_parts(words)), strict=True))

    def added_tokens(self) -> list[str]:
        """The tokens that are found in a text before all else."""
        return [token.content for token in self._backend.get_added_tokens_decoder().values()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids; ids that the vocabulary lacks are left out."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))


class EmbeddedTokenizer(FileTokenizer):
    """The embedded engine's own. It gives the ids that `HuggingFaceTokenizer` gives, and needs no transformers."""

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


@cache
def shipped_tokenizer() -> EmbeddedTokenizer:
    """The embedded engine's with its own template. A process loads it once, which takes 0.1 s."""
    return EmbeddedTokenizer()


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
