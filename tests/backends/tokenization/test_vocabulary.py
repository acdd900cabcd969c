"""What a tokenizer's files promise of every text, against the tokenizer itself."""

from __future__ import annotations

import copy
import json
import sys
import unicodedata
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from plait.backends.tokenization.tiktoken_encoding import SPLITS
from plait.backends.tokenization.tokenizer import EMBEDDED_FOLDER, load_tokenizer
from plait.backends.tokenization.vocabulary import (
    KNOWN_PATTERNS,
    NFC_SHRINKS,
    longest_token_bytes,
    may_cut,
    pieces,
)

SHIPPED = load_tokenizer("embedded")
FILES: dict[str, Any] = json.loads((EMBEDDED_FOLDER / "tokenizer.json").read_text())
PARTS = ["\n", "\r", " ", "a", "B", "é", "'s", "1", "!", "/", "<|im_end|>", "語", "\u0301", "!\na"]
texts = st.lists(st.sampled_from(PARTS)).map("".join)


def files(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(FILES) | changes


def split_at(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


VARIANTS = [files(), files(normalizer={"type": "NFC"})]
VARIANTS += [files(pre_tokenizer=split_at(pattern)) for pattern in sorted(KNOWN_PATTERNS)]


@pytest.mark.parametrize("variant", VARIANTS, ids=["gpt2", "nfc", "threes", "single"])
@given(text=texts, size=st.integers(2, 9))
def test_pieces_have_the_ids_of_the_whole(variant: dict[str, Any], text: str, size: int) -> None:
    assert may_cut(variant)
    tokenizer = RawTokenizer.from_str(json.dumps(variant)) if variant is not VARIANTS[0] else SHIPPED._backend  # type: ignore[attr-defined]
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    assert [token for piece in cut for token in tokenizer.encode(piece).ids] == tokenizer.encode(text).ids


@pytest.mark.parametrize("name", SPLITS)
def test_tiktokens_encodings_allow_the_same_cuts(tmp_path: Path, name: str) -> None:
    merges = [b"  ", b"\n\n", b"!\n", b"\na", b"aa", b" a", b"aB"]
    ranks = [*(bytes([byte]) for byte in range(256)), *merges]
    path = tmp_path / f"{name}.tiktoken"
    path.write_bytes(b"\n".join(b"%b %d" % (b64encode(token), rank) for rank, token in enumerate(ranks)))
    encode = load_tokenizer(f"tiktoken:{path}").encode

    @given(text=texts, size=st.integers(2, 9))
    def pieces_have_the_ids_of_the_whole(text: str, size: int) -> None:
        assert [token for piece in pieces(text, size) for token in encode(piece)] == encode(text)

    pieces_have_the_ids_of_the_whole()


@given(texts)
def test_no_text_has_fewer_tokens_than_its_bytes_need(text: str) -> None:
    longest = SHIPPED.longest_token_bytes
    assert longest is not None
    assert len(SHIPPED.encode(text)) * longest >= len(text.encode())


def test_the_longest_token_is_that_of_the_vocabulary() -> None:
    texts_of_tokens = [SHIPPED.decode([token]) for token in range(len(FILES["model"]["vocab"]))]
    assert SHIPPED.longest_token_bytes == max(len(text.encode()) for text in texts_of_tokens if "\ufffd" not in text)


def test_a_text_without_a_place_to_cut_is_one_piece() -> None:
    assert list(pieces("a" * 50, 10)) == ["a" * 50]
    assert list(pieces("a" * 20 + "\nb" * 3, 8)) == ["a" * 20 + "\n", "b\nb\nb"]


def test_nfc_makes_at_most_three_bytes_one() -> None:
    def length(text: str) -> int:
        return len(text.encode())

    characters = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    worst = max(
        length(unicodedata.normalize("NFD", one)) / length(unicodedata.normalize("NFC", one)) for one in characters
    )
    assert worst <= NFC_SHRINKS


BOUNDLESS = [
    {"model": FILES["model"] | {"type": "WordPiece"}},
    {"normalizer": {"type": "Strip"}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}},
    {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}},
    {"pre_tokenizer": {"type": "Whitespace"}},
    {"pre_tokenizer": None},
    {"added_tokens": [FILES["added_tokens"][0] | {"rstrip": True}]},
    {"model": FILES["model"] | {"vocab": {"a": 0}}},
]


@pytest.mark.parametrize("changes", BOUNDLESS, ids=lambda changes: next(iter(changes)))
def test_a_tokenizer_that_drops_text_has_no_bound(changes: dict[str, Any]) -> None:
    assert longest_token_bytes(files(**changes)) is None


def test_a_normalizer_widens_the_bound() -> None:
    longest = longest_token_bytes(FILES)
    assert longest is not None
    assert longest_token_bytes(files(normalizer={"type": "NFC"})) == NFC_SHRINKS * longest


def test_a_vocabulary_with_bytes_as_a_last_resort() -> None:
    """Llama 2's kind: spaces become ▁, and what is not in the vocabulary becomes bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁hello": 256}
    model = {"type": "BPE", "byte_fallback": True, "vocab": vocabulary}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
    llama = files(model=model, normalizer=normalizer, pre_tokenizer=None, added_tokens=[])
    assert longest_token_bytes(llama) == len("▁hello".encode())
    assert not may_cut(llama)


CUTLESS = [
    {"pre_tokenizer": split_at(r"\w+|.")},
    {"added_tokens": [FILES["added_tokens"][0] | {"content": "a\nb"}]},
    {"normalizer": {"type": "Lowercase"}},
]


@pytest.mark.parametrize("changes", CUTLESS, ids=lambda changes: next(iter(changes)))
def test_an_unknown_tokenizer_is_not_cut(changes: dict[str, Any]) -> None:
    assert not may_cut(files(**changes))
