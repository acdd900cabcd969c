"""Prefix keys at variable boundaries, and the index of waiting calls, against comparing prompts one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from struct import pack, unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policy.block_hash import root_hash
from policy.variable_prefix import (
    NOTHING_SHARED,
    Constant,
    Reference,
    Segment,
    Shared,
    WaitingPrefixes,
    prefix_keys,
)

ROOT = root_hash("model")
TASK = Reference("tenant", "session", "task")
CODE = Constant.of_text("You are an expert software engineer. Write code for ")
TEST = Constant.of_text("You are an experienced QA engineer. Write a test for ")

CONSTANTS = st.sampled_from([CODE, TEST, Constant.of_text(""), Constant.of_tokens([1, 2]), Constant.of_tokens([1])])
REFERENCES = st.builds(
    Reference,
    st.sampled_from(["t", "tt"]),
    st.sampled_from(["s", "ts"]),
    st.sampled_from(["v", "sv"]),
    st.sampled_from([None, None, "", "a snake game"]),
)
PROMPTS = st.lists(st.one_of(CONSTANTS, REFERENCES), max_size=4)


def meaning(segment: Segment) -> object:
    """What a segment stands for, in words."""
    if isinstance(segment, Constant):
        return segment.content
    return ("value", segment.value) if segment.value is not None else ("variable", segment)


@given(first=PROMPTS, second=PROMPTS, common=PROMPTS)
def test_keys_are_equal_exactly_as_far_as_prompts_mean_the_same(
    first: list[Segment], second: list[Segment], common: list[Segment]
) -> None:
    prompts = common + first, common + second
    left, right = (prefix_keys(prompt, ROOT) for prompt in prompts)
    assert (len(left), len(right)) == tuple(map(len, prompts))
    for depth in range(min(len(left), len(right))):
        same = [meaning(s) for s in prompts[0][: depth + 1]] == [meaning(s) for s in prompts[1][: depth + 1]]
        assert (left[depth] == right[depth]) == same
    assert set(left) & set(right) == {key for key, other in zip(left, right, strict=False) if key == other}


def test_sharing_is_visible_before_there_are_values() -> None:
    first = prefix_keys([CODE, TASK, Constant.of_text("in Python")], ROOT)
    second = prefix_keys([CODE, TASK, Constant.of_text("in Rust")], ROOT)
    elsewhere = prefix_keys([CODE, replace(TASK, session="other"), Constant.of_text("in Python")], ROOT)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert first[0] == elsewhere[0]
    assert not set(first[1:]) & set(elsewhere[1:])


def test_two_variables_with_the_same_text_are_the_same_even_across_sessions() -> None:
    mine, yours = replace(TASK, value="a snake game"), Reference("b", "s", "goal", "a snake game")
    assert prefix_keys([CODE, mine, TEST], ROOT) == prefix_keys([CODE, yours, TEST], ROOT)
    assert prefix_keys([CODE, mine], ROOT)[1] != prefix_keys([CODE, TASK], ROOT)[1], "it has a value now"
    as_text = prefix_keys([CODE, Constant.of_text("a snake game")], ROOT)
    assert prefix_keys([CODE, mine], ROOT)[1] != as_text[1], "a constant is part of the template"


def test_calls_of_different_models_or_salts_share_nothing() -> None:
    roots = [root_hash("model"), root_hash("other"), root_hash("model", "salt")]
    assert len({prefix_keys([CODE], root) for root in roots}) == 3


def test_the_chain_is_the_documented_one() -> None:
    """Gateways that talk to each other have to compute the same keys."""
    task, text = b"".join(pack(">I", len(part)) + part for part in (b"tenant", b"session", b"task")), sha256(b"a game")
    segments = (b"t" + pack("<3I", 1, 2, 3), b"i" + task, b"c" + text.digest(), b"v" + text.digest())
    expected: list[int] = []
    previous = pack(">Q", ROOT)
    for segment in segments:
        previous = sha256(previous + segment).digest()[:8]
        expected += unpack(">Q", previous)
    prompt: list[Segment] = [
        Constant.of_tokens([1, 2, 3]),
        TASK,
        Constant.of_text("a game"),
        replace(TASK, value="a game"),
    ]
    assert prefix_keys(prompt, ROOT) == tuple(expected)


def test_tokens_have_to_be_tokens() -> None:
    with pytest.raises(OverflowError):
        Constant.of_tokens([-1])


# The index


def test_waiting_calls_are_found_at_the_deepest_boundary_that_they_share() -> None:
    waiting = WaitingPrefixes()
    keys = {
        "python": prefix_keys([CODE, TASK, Constant.of_text("in Python")], ROOT),
        "rust": prefix_keys([CODE, TASK, Constant.of_text("in Rust")], ROOT),
        "other": prefix_keys([CODE, replace(TASK, name="other")], ROOT),
    }
    for call_id, its in keys.items():
        waiting.add(call_id, its)
    assert waiting.sharing(keys["python"]) == Shared(3, ("python",))
    assert waiting.sharing(keys["python"], besides="python") == Shared(2, ("rust",))
    assert waiting.sharing(keys["other"], besides="other") == Shared(1, ("python", "rust"))
    waiting.remove("rust")
    assert waiting.sharing(keys["python"], besides="python") == Shared(1, ("other",))
    assert waiting.sharing(prefix_keys([TEST], ROOT)) == NOTHING_SHARED
    assert "python" in waiting
    assert "rust" not in waiting


def test_a_call_moves_when_a_variable_of_its_prompt_has_its_value() -> None:
    waiting = WaitingPrefixes()
    known = replace(TASK, value="a snake game")
    waiting.add("waits", prefix_keys([CODE, TASK], ROOT))
    waiting.add("knows", prefix_keys([CODE, known], ROOT))
    assert waiting.sharing(prefix_keys([CODE, known], ROOT), besides="knows") == Shared(1, ("waits",))
    waiting.add("waits", prefix_keys([CODE, known], ROOT))
    assert waiting.sharing(prefix_keys([CODE, known], ROOT), besides="knows") == Shared(2, ("waits",))
    assert len(waiting) == 2
    waiting.check()


class Waiting(RuleBasedStateMachine):
    """The model compares whole prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = WaitingPrefixes()
        self.prompts: dict[str, tuple[int, ...]] = {}

    @staticmethod
    def keys(prompt: Sequence[int]) -> tuple[int, ...]:
        return prefix_keys([Constant.of_tokens([token]) for token in prompt], ROOT)

    @rule(call_id=st.sampled_from("abcdef"), prompt=st.lists(st.integers(0, 1), max_size=4).map(tuple))
    def add(self, call_id: str, prompt: tuple[int, ...]) -> None:
        self.waiting.add(call_id, self.keys(prompt))
        self.prompts.pop(call_id, None)
        self.prompts[call_id] = prompt

    @rule(call_id=st.sampled_from("abcdef"))
    def remove(self, call_id: str) -> None:
        self.waiting.remove(call_id)
        self.prompts.pop(call_id, None)

    @rule(
        prompt=st.lists(st.integers(0, 1), max_size=4).map(tuple),
        besides=st.one_of(st.none(), st.sampled_from("abcdef")),
    )
    def sharing(self, prompt: tuple[int, ...], besides: str | None) -> None:
        expected = NOTHING_SHARED
        for depth in range(1, len(prompt) + 1):
            calls = tuple(c for c, other in self.prompts.items() if c != besides and other[:depth] == prompt[:depth])
            expected = Shared(depth, calls) if calls else expected
        assert self.waiting.sharing(self.keys(prompt), besides) == expected

    @invariant()
    def the_index_holds_exactly_the_waiting_calls(self) -> None:
        self.waiting.check()
        assert len(self.waiting) == len(self.prompts)
        assert all(call_id in self.waiting for call_id in self.prompts)


TestWaiting = Waiting.TestCase
