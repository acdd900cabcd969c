"""Prompts that never repeat but have much in common, as those of clients: new text, edits, and what goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from plait.backends.tokenization.checked_encoder import PROVING_PROMPTS
from plait.backends.tokenization.file_tokenizer import FileTokenizer
from plait.backends.tokenization.prompt_encoder import PartCache, PromptEncoder
from plait.backends.tokenization.tokenizer import Tokenizer
from tests.backends.tokenization.test_cuts import PARTS
from tests.backends.tokenization.trained import TEXT

KINDS: Final = ("gpt-2", "llama 3", "qwen 2", "o200k", "deepseek", "llama 2")
"""Six kinds of tokenizer: the rules of as many model families."""

CACHE_BYTES: Final = 400_000
PART_CHARACTERS: Final = 64
_WORDS: Final = " ".join(TEXT).split(" ")


def prompts(seed: str) -> Iterator[str]:
    """Prompts without end."""
    dice, text = random.Random(seed), ""
    while True:
        match dice.randrange(5):
            case 0:
                text = ""
            case 1 if text:
                begin = dice.randrange(len(text))
                text = text[:begin] + _new(dice) + text[begin + dice.choice((0, 1, 10)) :]
            case 2 if len(text) > 1_000:
                text = text[: dice.randrange(1_000)]
        text += _new(dice)
        yield text


def _new(dice: random.Random) -> str:
    """Prose, code, numbers, and what patterns and normalizers treat differently."""
    begin = dice.randrange(len(_WORDS) - 50)
    match dice.randrange(7):
        case 0:
            return "".join(dice.choices(PARTS, k=dice.randint(1, 20)))
        case 1:
            return "".join(chr(dice.randrange(0xD7FF)) for _ in range(dice.randint(1, 9)))
        case 2:
            lines = "".join(
                f"\n{' ' * dice.choice((0, 4, 8))}x{dice.randrange(99)} = f({word})" for word in _WORDS[begin:][:3]
            )
            return f"\n\tdef f():{lines}\r\n"
        case 3:
            return f" {dice.randrange(10**6)},{dice.random()}: "
        case _:
            return " ".join(_WORDS[begin : begin + dice.randint(1, 40)])


class Checked:
    """A small cache in front of a tokenizer. `check` compares a prompt's ids with the tokenizer's own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encoder = PromptEncoder(tokenizer, 16, PartCache(CACHE_BYTES), PART_CHARACTERS)
        assert isinstance(tokenizer, FileTokenizer)
        self.native = tokenizer.encoder
        self.native.equal = PROVING_PROMPTS  # so that its own ids are compared

    def check(self, prompt: str, salt: str) -> None:
        """Raises AssertionError for other ids, or if more memory is held than was given."""
        steps = self.encoder.steps(prompt, ("m", salt), 0, add_special_tokens=False)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            ids = end.value.ids
        assert ids.tolist() == self.encoder.tokenizer.encode(prompt, add_special_tokens=False), repr(prompt)
        assert self.encoder.cache.held_bytes <= CACHE_BYTES
