"""Prefix keys at variable boundaries, against comparing prompts segment by segment."""

from __future__ import annotations

from hashlib import sha256
from itertools import combinations
from struct import pack, unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.prefix.block_hash import root_hash
from plait.policy.programs.variable_prefix import MOST_SEGMENTS, NO_OUTLINE, Constant, Outline, Segment, shared_segments

ROOT = root_hash("model")
CODE = Constant(b"You are an expert software engineer. Write code for ", 12)
TEST = Constant(b"You are an experienced QA engineer. Write a test for ", 13)
PYTHON, RUST = Constant(b" in Python", 2), Constant(b" in Rust", 2)

SEGMENTS = st.sampled_from([CODE, TEST, Constant(b"", 0), Constant(b"task", 1), "task", "c", "code"])
PROMPTS = st.lists(st.lists(SEGMENTS, max_size=4), min_size=1, max_size=5)


def outline(*segments: Segment, root: int = ROOT) -> Outline:
    return Outline.of(segments, root)


def common(first: list[Segment], second: list[Segment]) -> int:
    """The oracle: how far two prompts are the same."""
    depth = 0
    while depth < min(len(first), len(second)) and first[depth] == second[depth]:
        depth += 1
    return depth


@given(prompts=PROMPTS, start=st.lists(SEGMENTS, max_size=3))
def test_prompts_share_what_every_pair_of_them_has_in_common(
    prompts: list[list[Segment]], start: list[Segment]
) -> None:
    prompts = [start + prompt for prompt in prompts]
    pairs = [common(first, second) for first, second in combinations(prompts, 2)]
    outlines = [outline(*prompt) for prompt in prompts]
    assert shared_segments(outlines) == min([len(prompts[0]), *pairs])
    every_key = [set(one.keys) for one in outlines]
    for first, second in combinations(range(len(prompts)), 2):
        assert len(every_key[first] & every_key[second]) == common(prompts[first], prompts[second])


@given(
    prompt=st.lists(SEGMENTS, max_size=5),
    lengths=st.dictionaries(st.sampled_from(["task", "c", "code"]), st.integers(0, 9)),
)
def test_a_prefix_is_as_long_as_its_texts_and_values(prompt: list[Segment], lengths: dict[str, int]) -> None:
    one = outline(*prompt)
    for depth in range(len(prompt) + 1):
        sizes = [lengths.get(part, 0) if isinstance(part, str) else part.tokens for part in prompt[:depth]]
        assert one.tokens(depth, lambda name: lengths.get(name, 0)) == sum(sizes)


def test_sharing_is_visible_before_there_are_values() -> None:
    prompts = [outline(CODE, "task", PYTHON), outline(CODE, "task", RUST), outline(CODE, "goal", PYTHON)]
    assert shared_segments(prompts[:2]) == 2
    assert shared_segments(prompts) == 1
    assert shared_segments([*prompts, outline(TEST, "task")]) == 0
    assert prompts[0].tokens(2, {"task": 100}.__getitem__) == 112


def test_nothing_is_shared_with_a_prompt_that_is_not_known_or_by_nobody() -> None:
    assert shared_segments([outline(CODE), NO_OUTLINE]) == shared_segments([NO_OUTLINE]) == shared_segments([]) == 0


def test_calls_of_different_models_or_salts_share_nothing() -> None:
    roots = [root_hash("model"), root_hash("other"), root_hash("model", "salt")]
    assert len({outline(CODE, root=root).keys for root in roots}) == 3


@pytest.mark.parametrize("end", [PYTHON, "task"])
def test_a_prompt_of_very_many_segments_is_cut(end: Segment) -> None:
    long = outline(*(["task"] * MOST_SEGMENTS), end)
    assert len(long.keys) == len(long.sizes) == MOST_SEGMENTS
    assert long == outline(*(["task"] * MOST_SEGMENTS))


def test_the_chain_is_the_documented_one() -> None:
    """Gateways that talk to each other have to compute the same keys."""
    expected: list[int] = []
    previous = pack(">Q", ROOT)
    for content in (b"c" + PYTHON.content, b"vtask", b"ctask"):
        previous = sha256(previous + content).digest()[:8]
        expected += unpack(">Q", previous)
    assert outline(PYTHON, "task", Constant(b"task", 1)).keys == tuple(expected)
