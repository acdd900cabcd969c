"""The embedded engine's text: endless, readable, plainly synthetic English, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from plait.backends.tokenization.tokenizer import Tokenizer

OPENING: Final = "This is emulated text."
SUBJECTS: Final = (
    "The old engine", "A small green bird", "The night train", "Every second door", "The quiet harbor", "A paper map",
    "The third teacher", "Some distant music", "The morning letter", "A round table", "The new bridge",
    "One good answer", "The winter garden", "A slow river", "The last window", "Another clock",
)  # fmt: skip
VERBS: Final = ("counts", "follows", "remembers", "opens", "carries", "describes", "waits for", "looks after")
OBJECTS: Final = (
    "the blue stones", "a long list of names", "the people in the market", "seven empty boxes", "the road to the sea",
    "a question about time", "the light under the trees", "nothing in particular",
)  # fmt: skip
# 1,024: enough that the text does not look like a loop, few enough that a server has soon encoded all of them.
SENTENCES: Final = len(SUBJECTS) * len(VERBS) * len(OBJECTS)


class EmulatedToken(NamedTuple):
    """A generated token, and the text that it adds."""

    token_id: int
    text: str


class TextSource(Iterator[EmulatedToken]):
    """The tokens of one call's output, without end.

    If the tokenizer splits at spaces, encoding the text of the first n tokens gives their ids again. So the next turn
    of a conversation finds the output in the cache.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._sentences = _sentences(tokenizer)
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._rest = iter(self._sentences.opening)

    def __next__(self) -> EmulatedToken:
        for token in self._rest:
            return token
        self._rest = iter(self._sentences[int(self._random.random() * SENTENCES)])
        return next(self._rest)


class _EncodedSentences(dict[int, tuple[EmulatedToken, ...]]):
    """Sentences by number. Each is encoded at its first use (tens of microseconds) and then shared by all calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._context = tokenizer.encode(OPENING, add_special_tokens=False)
        self.opening = self._tokens([], self._context)

    def __missing__(self, number: int) -> tuple[EmulatedToken, ...]:
        # Encoded after another sentence, because some tokenizers treat the start of a text differently.
        text = f" {_sentence(number)}"
        ids = self._tokenizer.encode(OPENING + text, add_special_tokens=False)
        length = len(self._context)
        own = ids[length:] if ids[:length] == self._context else self._tokenizer.encode(text, add_special_tokens=False)
        tokens = self[number] = self._tokens(self._context, own)
        return tokens

    def _tokens(self, context: list[int], ids: list[int]) -> tuple[EmulatedToken, ...]:
        """Each id with the text that it adds to the previous id. Decoded alone, an id may lose its leading space."""
        decode = self._tokenizer.decode
        tokens: list[EmulatedToken] = []
        before = context[-1:]
        for token_id in ids:
            tokens.append(EmulatedToken(token_id, decode([*before, token_id])[len(decode(before)) :]))
            before = [token_id]
        return tuple(tokens)


@lru_cache(maxsize=8)
def _sentences(tokenizer: Tokenizer) -> _EncodedSentences:
    return _EncodedSentences(tokenizer)


def _sentence(number: int) -> str:
    number, thing = divmod(number, len(OBJECTS))
    number, verb = divmod(number, len(VERBS))
    return f"{SUBJECTS[number]} {VERBS[verb]} {OBJECTS[thing]}."
