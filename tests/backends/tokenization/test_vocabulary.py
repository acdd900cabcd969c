"""What a tokenizer's files promise of every text, against the tokenizer itself."""

from __future__ import annotations

import copy
import json
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.vocabulary import (
    NFC_SHRINKS,
    ids_around,
    longest_token_bytes,
)

SHIPPED = load_tokenizer("embedded")
FILES: dict[str, Any] = json.loads((EMBEDDED_FOLDER / "tokenizer.json").read_text())
PARTS = ["\n", "\r", " ", "a", "B", "é", "'s", "1", "!", "/", "<|im_end|>", "語", "\u0301", "!\na"]
texts = st.lists(st.sampled_from(PARTS)).map("".join)


def files(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(FILES) | changes


@given(texts)
def test_no_text_has_fewer_tokens_than_its_bytes_need(text: str) -> None:
    longest = SHIPPED.longest_token_bytes
    assert longest is not None
    assert len(SHIPPED.encode(text)) * longest >= len(text.encode())


def test_the_longest_token_is_that_of_the_vocabulary() -> None:
    texts_of_tokens = [SHIPPED.decode([token]) for token in range(len(FILES["model"]["vocab"]))]
    assert SHIPPED.longest_token_bytes == max(len(text.encode()) for text in texts_of_tokens if "\ufffd" not in text)


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


BOS, EOS = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}
PROMPT = {"Sequence": {"id": "A", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def template(*single: dict[str, Any]) -> dict[str, Any]:
    tokens = {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in (("<s>", 1), ("</s>", 2))}
    return {"type": "TemplateProcessing", "single": list(single), "pair": list(single), "special_tokens": tokens}


def in_order(*processors: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "processors": list(processors)}


@pytest.mark.parametrize(
    ("processor", "around"),
    [
        (None, ([], [])),
        (BYTES, ([], [])),
        (template(BOS, PROMPT), ([1], [])),
        (template(BOS, BOS, PROMPT, EOS), ([1, 1], [2])),
        (in_order(BYTES, template(BOS, PROMPT)), ([1], [])),
        (in_order(template(BOS, PROMPT, EOS), template(EOS, PROMPT, BOS)), ([2, 1], [2, 1])),
        (template(BOS), None),
        ({"type": "RobertaProcessing"}, None),
    ],
)
def test_the_ids_around_a_prompt_are_those_of_the_post_processor(processor: Any, around: Any) -> None:
    assert ids_around(files(post_processor=processor)) == around
