"""Tokenizers of a tokenizer.json, encoded by `tokenizers`."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer as Backend

from plait.backends.tokenization.cuts import find_cuts
from plait.backends.tokenization.tokenizer import ChatTokenizer, not_unicode
from plait.backends.tokenization.vocabulary import ids_around, longest_token_bytes

# Parts are encoded in batches, for which `tokenizers` would take all cores. A turn has one.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class FileTokenizer(ChatTokenizer):
    """A tokenizer.json. How chats are rendered is left to its kinds."""

    def __init__(self, name: str, backend: Backend, special_ids: frozenset[int]) -> None:
        super().__init__()
        self.name = name
        self.special_ids = special_ids
        self._backend = backend
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
        try:
            encodings = self._backend.encode_batch_fast(parts, add_special_tokens=False)
        except TypeError as error:
            raise not_unicode() from error
        return [array("I", encoding.ids) for encoding in encodings]

    def vocabulary(self) -> Mapping[str, int]:
        """All tokens with their ids."""
        vocabulary: Mapping[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def added_tokens(self) -> list[str]:
        """The tokens that are found in a text before all else."""
        return [token.content for token in self._backend.get_added_tokens_decoder().values()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids; ids that the vocabulary lacks are left out."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))
