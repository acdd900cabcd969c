"""What is encoded part by part, from whatever is known, is what is encoded whole."""

from __future__ import annotations

import itertools
import json
import random
from array import array
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from plait.backends.errors import CallerError
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.prompt_encoder import (
    MAX_PART_CHARACTERS,
    PART_CHARACTERS,
    SMALL_PARTS,
    TURN_CHARACTERS,
    EncodedPrompt,
    PartCache,
    PromptEncoder,
)
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.policy.prefix.block_hash import chain, extend_chain, root_hash
from tests.backends.tokenization.prompts import KINDS as FAMILIES
from tests.backends.tokenization.prompts import Checked, prompts
from tests.backends.tokenization.test_cuts import PARTS
from tests.backends.tokenization.trained import VARIANTS, files_of, rank_file, raw

BLOCK_TOKENS = 4
ROOT = root_hash("m")
KINDS = ["gpt-2", "llama 3", "qwen 2", "prefix space", "llama 2", "llama 2, legacy", "gemma", "tiktoken", "bytes"]
EDITS = 10_000 // len(KINDS) + 1
"""Of each kind, so that there are 10,000 in all."""


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: load(kind, tmp_path_factory.mktemp("tokenizer")) for kind in KINDS}


def load(kind: str, folder: Path) -> Tokenizer:
    if kind == "tiktoken":
        return load_tokenizer(f"tiktoken:{rank_file(folder, 'cl100k_base')}")
    if kind not in VARIANTS:
        return load_tokenizer(kind)
    tokenizer = raw(files_of(kind))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return load_tokenizer(str(folder))


def encoder_of(tokenizer: Tokenizer, max_bytes: int = 2**20, part_characters: int = 8) -> PromptEncoder:
    return PromptEncoder(tokenizer, BLOCK_TOKENS, PartCache(max_bytes), part_characters)


def encoded(encoder: PromptEncoder, text: str, scope: Hashable = "m", *, adds: bool = False) -> EncodedPrompt:
    """The prompt with all its hashes."""
    steps = encoder.steps(text, scope, ROOT, add_special_tokens=adds)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            prompt: EncodedPrompt = end.value
            extend_chain(prompt.hashes, prompt.ids, BLOCK_TOKENS, ROOT)
            return prompt


def check(encoder: PromptEncoder, text: str, *, adds: bool = False) -> None:
    """Compare with the whole, which is encoded anew."""
    prompt = encoded(encoder, text, adds=adds)
    ids = encoder.tokenizer.encode(text, add_special_tokens=adds)
    assert list(prompt.ids) == ids
    assert prompt.hashes == chain(ids, BLOCK_TOKENS, ROOT)


def edited(text: str, dice: random.Random) -> str:
    """The text with something inserted, removed, replaced or appended, or cut off."""
    begin = dice.randrange(len(text) + 1)
    end = min(len(text), begin + dice.choice((0, 0, 1, 2, 10)))
    new = "".join(dice.choices(PARTS, k=dice.choice((0, 1, 1, 3))))
    match dice.randrange(6):
        case 0:
            return text[:begin]
        case 1 | 2:
            return text + new
        case _:
            return text[:begin] + new + text[end:]


@pytest.mark.parametrize("kind", KINDS)
def test_10000_random_edits(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    dice = random.Random(f"edits of {kind}")
    encoder = encoder_of(tokenizers[kind], max_bytes=100_000, part_characters=dice.choice((8, 32, 64)))
    text = ""
    for number in range(EDITS):
        text = edited(text, dice) if 0 < len(text) < 600 else "".join(dice.choices(PARTS, k=100))
        check(encoder, text, adds=number % 3 == 0)
    assert encoder.cache.held_bytes > 50_000, "something was kept"


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_begin_alike(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    @given(
        shared=st.lists(st.sampled_from(PARTS), min_size=10).map("".join),
        rests=st.lists(st.lists(st.sampled_from(PARTS)).map("".join) | st.text(), min_size=2, max_size=4),
        part_characters=st.integers(1, 40),
        adds=st.booleans(),
    )
    def all_are_exact(shared: str, rests: list[str], part_characters: int, adds: bool) -> None:
        encoder = encoder_of(tokenizers[kind], part_characters=part_characters)
        for rest in rests:
            check(encoder, shared + rest, adds=adds)

    all_are_exact()


@pytest.mark.parametrize("kind", FAMILIES)
def test_prompts_that_never_repeat(tmp_path: Path, kind: str) -> None:
    """`python -m benchmarks exact_tokens` tries as many as it is told to."""
    checked = Checked(load(kind, tmp_path))
    for number, prompt in enumerate(itertools.islice(prompts(kind), 150)):
        checked.check(prompt, f"tenant {number % 2}")


class Counting:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode(text, **options)

    def encode_array(self, text: str, **options: Any) -> array[int]:
        self.characters += len(text)
        return self._tokenizer.encode_array(text, **options)

    def encode_parts(self, parts: list[str]) -> list[array[int]]:
        self.characters += sum(map(len, parts))
        return self._tokenizer.encode_parts(parts)


@pytest.fixture
def counting() -> Any:
    return Counting(load_tokenizer("embedded"))


DOCUMENT = "".join(f"Line {number} of a document that many questions share.\n" for number in range(2_000))


def test_only_what_is_new_is_encoded(counting: Any) -> None:
    encoder = PromptEncoder(counting, BLOCK_TOKENS, PartCache(2**22))
    encoded(encoder, DOCUMENT + "Who wrote it?")
    counting.characters = 0
    encoded(encoder, DOCUMENT + "When was it written?")
    assert counting.characters < 1.1 * PART_CHARACTERS, "a part at most, and the question"
    counting.characters = 0
    encoded(encoder, DOCUMENT + "Where was it written?")
    assert counting.characters < 1.5 * PART_CHARACTERS / SMALL_PARTS, "a small part at most, and the question"


def test_a_chat_that_grows_is_encoded_as_far_as_it_grew(counting: Any) -> None:
    encoder = PromptEncoder(counting, BLOCK_TOKENS, PartCache(2**22))
    text = ""
    for turn in range(40):
        counting.characters = 0
        text += f"What was said in turn {turn} of a chat, in more words than that. " * turn
        check(encoder, text)
        new, checked = 65 * turn, len(text)
        assert counting.characters - checked < new + 1.5 * PART_CHARACTERS


def test_prompts_of_two_scopes_share_nothing(counting: Any) -> None:
    encoder = PromptEncoder(counting, BLOCK_TOKENS, PartCache(2**22))
    encoded(encoder, DOCUMENT, scope=("m", "tenant one"))
    counting.characters = 0
    encoded(encoder, DOCUMENT, scope=("m", "tenant two"))
    assert counting.characters == len(DOCUMENT)


def test_nothing_is_kept_without_memory(counting: Any) -> None:
    encoder = PromptEncoder(counting, BLOCK_TOKENS, PartCache(0))
    for _ in range(2):
        assert list(encoded(encoder, DOCUMENT).ids) == load_tokenizer("embedded").encode(DOCUMENT)
    assert counting.characters == 2 * len(DOCUMENT)
    assert encoder.cache.held_bytes == 0


def test_a_short_prompt_is_encoded_whole(counting: Any) -> None:
    encoder = encoder_of(counting)
    assert list(encoded(encoder, "a b c d").ids)
    assert encoder.cache.held_bytes == 0


def test_two_prompts_that_take_turns_share_what_either_has_encoded() -> None:
    encoder = encoder_of(load_tokenizer("embedded"), part_characters=1_024)
    text = DOCUMENT * 4
    first, second = (encoder.steps(text, "m", ROOT, add_special_tokens=False) for _ in range(2))
    ends: list[EncodedPrompt] = []
    turns = 0
    while len(ends) < 2:
        for steps in (first, second):
            try:
                next(steps)
                turns += 1
            except StopIteration as end:
                ends.append(end.value)
    assert turns == 2 * -(-len(text) // TURN_CHARACTERS)
    assert ends[0] == ends[1] == EncodedPrompt(array("I", encoder.tokenizer.encode(text)), ends[0].hashes)
    held_bytes = encoder.cache.held_bytes
    encoded(encoder, text)
    assert encoder.cache.held_bytes == held_bytes


def test_prompts_are_exact_in_threads_that_share_a_small_cache() -> None:
    encoder = encoder_of(load_tokenizer("embedded"), max_bytes=20_000)

    def many_edits(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(100):
            check(encoder, edited(DOCUMENT[:1_000], dice))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(many_edits, range(4)))


def test_a_prompt_that_cannot_be_cut_is_refused() -> None:
    encoder = encoder_of(load_tokenizer("embedded"), part_characters=1_024)
    with pytest.raises(CallerError, match="without a space") as caught:
        encoded(encoder, "a " * 10_000 + "a" * MAX_PART_CHARACTERS)
    assert caught.value.code == "prompt_without_spaces"


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(CallerError, match="surrogate"):
        encoded(encoder_of(load_tokenizer("embedded")), "a b " * 100 + "\ud800")
