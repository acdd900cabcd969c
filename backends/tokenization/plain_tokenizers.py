"""Tokenizers without a chat template of their own: tiktoken's encodings, and bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from sys import byteorder
from typing import TYPE_CHECKING, Any

from plait.backends.tokenization.chatml import CHATML, render
from plait.backends.tokenization.cuts import cuts_of_words
from plait.backends.tokenization.tokenizer import ChatTokenizer, not_unicode
from plait.backends.tokenization.word_patterns import GPT2

if TYPE_CHECKING:
    import tiktoken


_UTF_32 = f"utf-32-{byteorder[0]}e"


class _PlainTokenizer(ChatTokenizer):
    """A tokenizer without a template of its own. It uses ChatML unless another template is given."""

    def __init__(self, chat_template: str | None) -> None:
        self._own_template = chat_template or CHATML

    def _template(self, chat_template: str | None, tools: list[dict[str, Any]] | None) -> str:  # noqa: ARG002
        return chat_template or self._own_template

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return render(messages, **options)


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
    cuts = cuts_of_words(GPT2, ())  # any cut would do

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        """The bytes of the prompt's UTF-8."""
        return list(_utf8(text))

    def encode_array(self, text: str, *, add_special_tokens: bool = True) -> array[int]:  # noqa: ARG002
        """The same. In UTF-32, a character of Latin 1 for each byte is that byte as a 32-bit integer."""
        ids = array("I")
        ids.frombytes(_utf8(text).decode("latin-1").encode(_UTF_32))
        return ids

    def vocabulary(self) -> Mapping[str, int]:
        """All bytes, each as a character."""
        return {chr(byte): byte for byte in range(256)}

    def added_tokens(self) -> Iterable[str]:
        """None."""
        return ()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the bytes."""
        return bytes(token_ids).decode(errors="replace")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise not_unicode() from error
