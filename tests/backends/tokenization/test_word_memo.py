"""The ids of a text's words are the ids of the text, whatever the memo has kept or forgotten."""

from __future__ import annotations

import gc
import itertools
import random
import tracemalloc
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from hypothesis import given, settings

from plait.backends.errors import CallerError
from plait.backends.tokenization.cuts import (
    BEFORE_SPACES,
    BETWEEN_WORDS,
    WORDS_BEFORE_SPACES,
    WORDS_BETWEEN,
    find_cuts,
)
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.prompt_encoder import WordMemo
from plait.backends.tokenization.tokenizer import Tokenizer
from tests.backends.tokenization.test_cuts import CLASSES, texts
from tests.backends.tokenization.trained import VARIANTS, Files, files_of, raw

SHIPPED = load_tokenizer("embedded")
PATTERN = WORDS_BETWEEN
PROSE = [f"Sentence {number} of a text, in which words (most of them) come again.\n" for number in range(200)]


class Counting:
    """The shipped tokenizer, with the words and texts that it encodes."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.cuts = SHIPPED.cuts
        self.common_words = SHIPPED.common_words

    def encode_parts(self, parts: Sequence[str]) -> list[array[int]]:
        self.encoded += parts
        return SHIPPED.encode_parts(parts)

    def encode_array(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        self.encoded.append(text)
        return SHIPPED.encode_array(text, add_special_tokens=add_special_tokens)


def check(memo: WordMemo, text: str, tokenizer: Any = SHIPPED, salt: str = "") -> None:
    assert memo.ids(text, tokenizer, PATTERN, salt) == SHIPPED.encode_array(text), text


@pytest.mark.parametrize(
    ("pattern", "place"),
    [(WORDS_BETWEEN, BETWEEN_WORDS), (WORDS_BEFORE_SPACES, BEFORE_SPACES)],
    ids=["between", "before"],
)
def test_every_short_text_is_divided_at_cuts_only(pattern: Any, place: Any) -> None:
    for characters in itertools.product(CLASSES + "\u00a0", repeat=4):
        text = "".join(characters)
        words = pattern.findall(text)
        assert "".join(words) == text
        assert "" not in words
        cuts = {found.start() for found in place.finditer(text)}
        assert set(itertools.accumulate(map(len, words[:-1]))) <= cuts, words


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_text_has_the_ids_of_its_words(variant: str) -> None:
    tokenizer = Files(variant, raw(files_of(variant)), frozenset())
    assert tokenizer.cuts is not None
    pattern = tokenizer.cuts.words
    if pattern is None:
        assert tokenizer.cuts.restores_space
        return
    memo = WordMemo(50_000)

    @settings(max_examples=60)
    @given(text=texts)
    def words_are_exact(text: str) -> None:
        for _ in range(2):
            whole = tokenizer.encode_array(text, add_special_tokens=False)
            assert memo.ids(text, tokenizer, pattern, "") == whole

    words_are_exact()


def test_the_words_of_marked_spaces_end_at_cuts() -> None:
    cuts = find_cuts(files_of("metaspace, never"))
    assert cuts is not None
    assert cuts.words is not None
    for characters in itertools.product(" a\u2581\n.", repeat=5):
        text = "".join(characters)
        words = cuts.words.findall(text)
        assert "".join(words) == text
        assert set(itertools.accumulate(map(len, words[:-1]))) <= {found.start() for found in cuts.place.finditer(text)}


def test_a_word_is_encoded_once() -> None:
    memo, tokenizer = WordMemo(2**20), Counting()
    for text in PROSE:
        check(memo, text, tokenizer)
    assert len(tokenizer.encoded) == len(set(tokenizer.encoded)) < 300, "the numbers are new, and the first text"


def test_tenants_that_are_isolated_share_no_words() -> None:
    memo, tokenizer = WordMemo(2**20), Counting()
    for salt in ("one", "two"):
        tokenizer.encoded.clear()
        for _ in range(2):
            check(memo, PROSE[0], tokenizer, salt)
        assert "".join(tokenizer.encoded).count("Sentence") >= 1
    assert "('one" not in repr(memo)


def test_the_words_of_the_vocabulary_are_known_to_all() -> None:
    memo, tokenizer = WordMemo(2**20), Counting()
    memo.prepare(cast("Tokenizer", tokenizer))
    for salt in ("one", "two"):
        check(memo, "the other function is in the module and returns a list of names", tokenizer, salt)
    assert tokenizer.encoded == []


def test_the_words_of_the_vocabulary_have_the_ids_that_they_have_in_texts() -> None:
    memo = WordMemo(2**20)
    memo.prepare(SHIPPED)
    for word in memo._common[SHIPPED]:
        check(memo, f"a{word}")
        check(memo, word)


def test_a_text_of_new_words_is_encoded_whole_and_some_are_kept() -> None:
    memo, tokenizer = WordMemo(2**20), Counting()
    text = " ".join(f"w{number}" for number in range(640))
    for _ in range(40):
        check(memo, text, tokenizer)
    assert tokenizer.encoded.count(text) > 5
    tokenizer.encoded.clear()
    check(memo, text, tokenizer)
    assert tokenizer.encoded == []


@pytest.mark.parametrize("scopes", [1, 3])
def test_memory_is_bounded_over_prompts_that_never_repeat(scopes: int) -> None:
    memo, dice = WordMemo(60_000), random.Random(5)
    for number in range(1_000):
        words = [f"{dice.choice('abc')}{dice.randrange(10**6)}" if dice.random() < 0.1 else "the" for _ in range(40)]
        check(memo, " ".join(words), salt=f"tenant {number % scopes}")
        assert memo.held_bytes <= 60_000
    assert memo.held_bytes > 20_000


def test_the_counted_bytes_are_those_that_are_used() -> None:
    memo, texts = WordMemo(2**24), [" ".join(f"word{n}x{m}" for m in range(16)) for n in range(100)]
    check(memo, texts[0])
    gc.collect()
    tracemalloc.start()
    for text in texts:
        for _ in range(8):
            memo.ids(text, SHIPPED, PATTERN, "")
    gc.collect()
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 * used_bytes < memo.held_bytes < 1.6 * used_bytes


def test_threads_share_a_small_memo() -> None:
    memo = WordMemo(5_000)

    def many(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            check(memo, " ".join(dice.choices(PROSE, k=3)))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(many, range(4)))


def test_a_long_word_is_not_kept() -> None:
    memo = WordMemo(2**20)
    check(memo, "a" * 1_000 + " b c d e f")
    assert memo.held_bytes < 2_000


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(CallerError, match="not valid Unicode"):
        WordMemo(2**20).ids("a b c \ud800", SHIPPED, PATTERN, "")
