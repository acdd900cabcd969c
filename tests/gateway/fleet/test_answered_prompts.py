"""What engines have stored behind the prompts that they answered. Tree blocks have 4 tokens."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.fleet.engine_cache import AnsweredPrompts
from plait.policy.prefix.block_hash import chain, whole_hash

ROOT = 7
END = 99
"""The token that ends a turn."""


class Chat:
    """Engines that answer prompts, which are lists of tokens."""

    def __init__(self, most_prompts: int = 100) -> None:
        self.prompts = AnsweredPrompts(4, most_prompts)

    def answer(self, engine: str, prompt: list[int], output_tokens: int) -> None:
        hashes = chain(prompt, 4, ROOT)
        before = hashes[-1] if hashes else None
        whole = whole_hash(prompt[4 * len(hashes) :], ROOT if before is None else before)
        self.prompts.add(engine, whole, before, prompt, output_tokens)

    def stored(self, prompt: list[int], turn_ends: set[int] | None = None) -> Mapping[str, int]:
        return self.continued(prompt, turn_ends)[1]

    def continued(self, prompt: list[int], turn_ends: set[int] | None = None) -> tuple[int, Mapping[str, int]]:
        return self.prompts.continued(array("I", prompt), chain(prompt, 4, ROOT), ROOT, turn_ends)


def test_the_next_turn_has_the_answer_behind_the_prompt() -> None:
    chat = Chat()
    chat.answer("a", [1, 2, 3, 4, 5], output_tokens=6)
    assert chat.continued([1, 2, 3, 4, 5, *range(20, 40)]) == (1, {"a": 10}), "the last token's KV is not computed"
    assert chat.stored([1, 2, 3, 4, 6, *range(20, 40)]) == {}, "another prompt"
    assert chat.stored([1, 2, 3, 4, 5]) == {}, "the same prompt once more"
    assert chat.stored([1, 2, 3, 4, 5, 6, 7]) == {"a": 7}, "never more than the prompt has"


def test_the_longest_prompt_that_is_continued_counts() -> None:
    chat = Chat()
    chat.answer("a", [1, 2], output_tokens=3)
    chat.answer("b", [1, 2, 3, 4, 5], output_tokens=1)
    chat.answer("b", [1, 2, 3, 4, 5, 6, 7], output_tokens=0)
    assert chat.continued([1, 2, 3, 4, 5, 6, 7, 8, 9]) == (1, {"b": 7})
    assert chat.continued([1, 2, 3, 9, 9]) == (0, {"a": 4})


def test_engines_that_answered_the_same_prompt_count_alike() -> None:
    chat = Chat()
    chat.answer("a", [1, 2, 3], output_tokens=3)
    chat.answer("b", [1, 2, 3], output_tokens=5)
    assert chat.stored([1, 2, 3, *range(10, 30)]) == {"a": 5, "b": 7}
    chat.prompts.forget("a")
    assert chat.stored([1, 2, 3, *range(10, 30)]) == {"b": 7}
    chat.prompts.forget("b")
    assert len(chat.prompts.prompts) == 0


def test_a_chat_has_an_answer_only_where_a_turn_ends_behind_it() -> None:
    chat = Chat()
    chat.answer("a", [1, 2, 3], output_tokens=4)
    assert chat.stored([1, 2, 3, 4, 5, 6, END, 7], {END}) == {"a": 6}, "the end token was generated"
    assert chat.stored([1, 2, 3, 4, 5, 6, 7, END], {END}) == {"a": 6}, "the answer was cut"
    assert chat.stored([1, 2, 3, 4, END, 6, 7, 8], {END}) == {}, "an answer without its reasoning is shorter"
    assert chat.stored([1, 2, 3, 4, 5, 6, END, 7], set()) == {}


def test_the_oldest_prompts_are_forgotten() -> None:
    chat = Chat(most_prompts=2)
    for first in (1, 2, 1, 3):
        chat.answer("a", [first, 5], output_tokens=2)
    assert [bool(chat.stored([first, 5, 6, 7])) for first in (1, 2, 3)] == [True, False, True]


@given(
    answered=st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=10), st.integers(0, 5)), max_size=8),
    prompt=st.lists(st.integers(0, 1), max_size=14),
)
def test_as_if_each_prompt_were_compared(answered: list[tuple[list[int], int]], prompt: list[int]) -> None:
    chat, ends = Chat(), dict[tuple[int, ...], int]()
    for tokens, output_tokens in answered:
        chat.answer("a", tokens, output_tokens)
        ends[tuple(tokens)] = len(tokens) + max(0, output_tokens - 1)
    begun = [tokens for tokens in ends if len(tokens) < len(prompt) and tuple(prompt[: len(tokens)]) == tokens]
    longest = max(begun, key=len, default=None)
    expected = (0, {}) if longest is None else (len(longest) // 4, {"a": min(ends[longest], len(prompt))})
    assert chat.continued(prompt) == expected
