"""Tokenizers without a chat template of their own: tiktoken's encodings, and bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from sys import byteorder
from typing import TYPE_CHECKING, Any

from plait.backends.tokenization.chat_template import CHATML, render_as_transformers
from plait.backends.tokenization.cuts import BETWEEN_WORDS, Cuts, cuts_of_words
from plait.backends.tokenization.tokenizer import Tokenizer, not_unicode

if TYPE_CHECKING:
    import tiktoken


_UTF_32 = f"utf-32-{byteorder[0]}e"


class _PlainTokenizer(Tokenizer):
    """A tokenizer without a template of its own. It uses ChatML unless another template is given."""

    def __init__(self, chat_template: str | None) -> None:
        super().__init__()
        self._own_template = chat_template or CHATML
        self.guesses_template = chat_template is None

    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:  # noqa: ARG002
        return chat_template or self._own_template

    def _by_transformers(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return render_as_transformers(messages, **options)


class TiktokenTokenizer(_PlainTokenizer):
    """One of OpenAI's encodings."""

    def __init__(self, name: str, encoding: tiktoken.Encoding, chat_template: str | None = None) -> None:
        super().__init__(chat_template)
        self.name = name
        self._encoding = encoding
        self.longest_token_bytes = max(map(len, encoding.token_byte_values()), default=1)
        self.cuts = cuts_of_words(encoding._pat_str, encoding.special_tokens_set)  # noqa: SLF001 - tiktoken documents it

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        """The ids of a plain prompt; the encodings add no special tokens."""
        return self._encoding.encode(text, allowed_special="all")

    def vocabulary(self) -> Mapping[str, int]:
        """All tokens with their ids. A token has a character for each of its bytes."""
        ranks = self._encoding._mergeable_ranks | {  # noqa: SLF001 - tiktoken documents both
            text.encode(): token
            for text, token in self._encoding._special_tokens.items()  # noqa: SLF001
        }
        return {token.decode("latin-1"): rank for token, rank in ranks.items()}

    def added_tokens(self) -> Iterable[str]:
        """The encoding's special tokens."""
        return self._encoding.special_tokens_set

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids; KeyError where the encoding lacks one."""
        return self._encoding.decode(token_ids)


class ByteTokenizer(_PlainTokenizer):
    """Each byte is a token, for a model without a tokenizer at hand. Shared prefixes stay shared."""

    name = "bytes"
    exact = False
    longest_token_bytes: int | None = 1
    cuts: Cuts | None = Cuts(BETWEEN_WORDS)  # any cut would do

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        """The bytes of the prompt's UTF-8."""
        return list(_utf8(text))

    def encode_array(self, text: str, *, add_special_tokens: bool = True) -> array[int]:  # noqa: ARG002
        """As `encode`. Each byte, read as Latin 1, is the same number in UTF-32."""
        ids = array("I")
        ids.frombytes(_utf8(text).decode("latin-1").encode(_UTF_32))
        return ids

    def vocabulary(self) -> Mapping[str, int]:
        return {chr(byte): byte for byte in range(256)}

    def added_tokens(self) -> Iterable[str]:
        return ()

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


class EstimatedTokenizer(ByteTokenizer):
    """Four bytes are a token, about as in most vocabularies, for a model without a tokenizer at hand.

    Shared prefixes stay shared, and costs have the right order of magnitude.
    """

    name = "estimated"
    longest_token_bytes: int | None = 4
    cuts: Cuts | None = None  # each part would be padded by itself

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Each four bytes of the prompt's UTF-8 as an integer; the last ones are filled up with zeros."""
        return list(self.encode_array(text, add_special_tokens=add_special_tokens))

    def encode_array(self, text: str, *, add_special_tokens: bool = True) -> array[int]:  # noqa: ARG002
        """The same as unsigned 32-bit integers."""
        data = _utf8(text)
        ids = array("I")
        ids.frombytes(data + bytes(-len(data) % 4))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return array("I", token_ids).tobytes().decode(errors="replace")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise not_unicode() from error
