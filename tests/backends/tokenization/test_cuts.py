"""A text that is cut has the ids of the whole, for every kind of tokenizer, against the tokenizer itself."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, pre_tokenizers

from plait.backends.tokenization.cuts import (
    BEFORE_SPACES,
    BETWEEN_WORDS,
    CL100K,
    R50K,
    RUNS,
    WORDS,
    Cuts,
    find_cuts,
)
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tiktoken_encoding import SPLITS
from tests.backends.tokenization.trained import (
    GEMMA_SPLIT,
    PREPEND,
    REPLACE,
    SPECIAL,
    VARIANTS,
    bytes_of,
    files_of,
    metaspace,
    rank_file,
    raw,
    split_by,
    with_added,
)

PARTS = [
    *("\n", "\r\n", " ", "  ", "\t", "a", "B", "the", " return", "é", "e\u0301", "'s", "'ll", "1", "2024", ".", ";"),
    *("!", "/", '"', ",", "語", "。", "\uff0c", "コ", "한", "ы", "\u0301", "\u2581", "\u00a0", "\u2003", "\x00"),
    *("\x1f", "<", "☔", "\u037e", *SPECIAL),
]
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=2)).map("".join)
CLASSES = " \n\ta'A1.</語。\u0301"
"""A character of each class that the patterns tell apart."""


def cuts_of(files: dict[str, Any]) -> Cuts:
    cuts = find_cuts(files)
    assert cuts is not None
    return cuts


def spans_of(cuts: Cuts, text: str, size: int) -> list[tuple[int, int]]:
    """The text in parts of that size or a little more."""
    ends = [0]
    while ends[-1] < len(text):
        ends.append(cuts.after(text, ends[-1] + size))
    return list(itertools.pairwise(ends))


def places(cuts: Cuts, text: str) -> list[int]:
    return [found.start() for found in cuts.place.finditer(text)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_text_has_the_same_ids_wherever_it_is_cut(variant: str) -> None:
    cuts, tokenizer = cuts_of(files_of(variant)), raw(files_of(variant))

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return encoded

    @given(text=texts)
    def all_cuts(text: str) -> None:
        whole = ids(text)
        for place in places(cuts, text):
            begin, end = cuts.to_encode(text, 0, place), cuts.to_encode(text, place, len(text))
            assert ids(begin) + ids(end) == whole
        assert [token for span in spans_of(cuts, text, 3) for token in ids(cuts.to_encode(text, *span))] == whole

    all_cuts()


@pytest.mark.parametrize("name", SPLITS)
def test_tiktokens_encodings_allow_the_same_cuts(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(f"tiktoken:{rank_file(tmp_path, name)}")
    cuts = tokenizer.cuts
    assert cuts is not None
    assert cuts.place is BETWEEN_WORDS

    @given(text=texts)
    def all_cuts(text: str) -> None:
        whole = tokenizer.encode(text)
        for place in places(cuts, text):
            assert tokenizer.encode(text[:place]) + tokenizer.encode(text[place:]) == whole

    all_cuts()


@pytest.mark.parametrize("pattern", sorted(WORDS))
def test_every_short_text_has_the_same_words_wherever_it_is_cut(pattern: str) -> None:
    if pattern in {R50K, CL100K}:  # tiktoken's engine, unlike Oniguruma, has possessive intervals
        compiled = regex.compile(pattern)

        def words(text: str) -> list[str]:
            return [found.group() for found in compiled.finditer(text)]
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")

        def words(text: str) -> list[str]:
            return [word for word, _ in split.pre_tokenize_str(text)]

    for text in map("".join, itertools.product(CLASSES, repeat=4)):
        for found in BETWEEN_WORDS.finditer(text):
            place = found.start()
            assert words(text[:place]) + words(text[place:]) == words(text), (text, place)


@pytest.mark.parametrize("text", ["語。" * 40, "a b" * 40, "12\n" * 40, '{"a":"b"},' * 40, "한국어, " * 20])
def test_texts_of_many_kinds_have_cuts(text: str) -> None:
    assert len(spans_of(cuts_of(files_of("llama 3")), text, 10)) > 5


def test_a_cut_is_found_behind_a_long_way_without_one() -> None:
    cuts = cuts_of(files_of("llama 3"))
    for length in (16_380, 16_382, 16_383, 16_384, 16_385, 50_000):
        assert cuts.after("a" * length + " b c", 1) == length
        assert cuts.after("a" * length + " b c", length + 1) == length + 2
    assert cuts.after("a" * 50_000, 1) == 50_000


@pytest.mark.parametrize("length", [16_379, 16_380, 16_381, 16_382, 16_383, 16_384])
def test_a_cut_that_needs_two_characters_is_found_too(length: int) -> None:
    cuts = cuts_of(files_of("llama 2, legacy"))
    assert cuts.after("a" * length + " b", 1) == length


@pytest.mark.parametrize(
    ("variant", "added", "place"),
    [
        ("llama 3", AddedToken("a.b"), BEFORE_SPACES),
        ("llama 3", AddedToken("a\u037eb"), BEFORE_SPACES),
        ("llama 3", AddedToken("a b"), None),
        ("llama 3", AddedToken("<mask>", lstrip=True), BETWEEN_WORDS),
        ("llama 3", AddedToken("<mask>", rstrip=True), None),
        ("llama 3", AddedToken("mask", single_word=True), None),
        ("prefix space", AddedToken("a b"), None),
        ("llama 2", AddedToken("a b"), None),
        ("llama 2, legacy", AddedToken(" b"), None),
    ],
)
def test_added_tokens_forbid_the_cuts_that_they_may_span(variant: str, added: AddedToken, place: object) -> None:
    cuts = find_cuts(with_added(files_of(variant), added))
    assert (cuts and cuts.place) == place


@pytest.mark.parametrize("variant", ["llama 3", "llama 2", "llama 2, legacy", "gemma", "metaspace, split"])
@pytest.mark.parametrize("normalized", [True, False])
def test_added_tokens_that_take_spaces_are_found_as_in_the_whole(variant: str, normalized: bool) -> None:
    files = with_added(
        files_of(variant),
        AddedToken("<mask>", lstrip=True, normalized=normalized),
        AddedToken("x", normalized=normalized),
        AddedToken("\n\n", normalized=normalized),
    )
    cuts, tokenizer = cuts_of(files), raw(files)

    @given(text=st.lists(st.sampled_from(["<mask>", " ", "x", "a", "\n", "\u2581", "<s>"])).map("".join))
    def all_cuts(text: str) -> None:
        whole = tokenizer.encode(text).ids
        for place in places(cuts, text):
            ids = [tokenizer.encode(cuts.to_encode(text, *span)).ids for span in ((0, place), (place, len(text)))]
            assert ids[0] + ids[1] == whole

    all_cuts()


MODEL = files_of("llama 2")["model"]
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "an unknown pattern": ("gpt-2", {"pre_tokenizer": split_by(r"\w+|.")}),
    "runs without words": ("gpt-2", {"pre_tokenizer": split_by(*RUNS)}),
    "another behavior": ("gpt-2", {"pre_tokenizer": split_by(*WORDS, behavior="MergedWithNext")}),
    "another normalizer": ("gpt-2", {"normalizer": {"type": "Lowercase"}}),
    "no words": ("gpt-2", {"pre_tokenizer": bytes_of(use_regex=False)}),
    "prefix spaces within": (
        "gpt-2",
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [GEMMA_SPLIT, bytes_of(add_prefix_space=True)]}},
    ),
    "another model": ("gpt-2", {"model": {"type": "WordPiece"}}),
    "dropout": ("gpt-2", {"model": files_of("gpt-2")["model"] | {"dropout": 0.1}}),
    "a merge over a space": ("llama 2", {"model": MODEL | {"merges": [*MODEL["merges"], ["e", "\u2581"]]}}),
    "whole texts as tokens": ("llama 2", {"model": MODEL | {"ignore_merges": True}}),
    "no token for a space": ("llama 2", {"model": MODEL | {"vocab": {"a": 0}}}),
    "two marks": ("gemma", {"normalizer": REPLACE | {"content": "__"}}),
    "another mark is put first": (
        "gemma",
        {"normalizer": {"type": "Sequence", "normalizers": [PREPEND | {"prepend": "_"}, REPLACE]}},
    ),
    "no mark": ("gemma", {"normalizer": None}),
    "a mark twice": ("llama 2", {"normalizer": PREPEND, "pre_tokenizer": metaspace("first", split=False)}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_known_to_be_exact_is_not_cut(reason: str) -> None:
    variant, changes = REFUSED[reason]
    assert find_cuts(files_of(variant) | changes) is None
