"""The sessions of the comparison's workload."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby, pairwise

import pytest

from plait.lab.simulation.shared_prefixes import load_prefixes
from plait.lab.simulation.workload import THINK_S, WorkloadCall, generate_sessions

TURNS = 3


def sessions(calls: int = 3_000, seed: int = 1) -> list[list[WorkloadCall]]:
    drawn = generate_sessions(load_prefixes(None), calls, seed, 1.1, TURNS)
    return [list(turns) for _, turns in groupby(drawn, lambda call: call.session)]


def test_they_have_one_to_five_turns_equally_often() -> None:
    lengths = Counter(len(turns) for turns in sessions()[:-1])
    assert set(lengths) == {1, 2, 3, 4, 5}
    assert all(count == pytest.approx(200, rel=0.25) for count in lengths.values())


def test_each_turn_begins_with_the_one_before_and_adds_an_answer_and_a_question() -> None:
    for turns in sessions(300):
        for before, after in pairwise(turns):
            assert after.messages[: len(before.messages)] == before.messages
            assert [message["role"] for message in after.messages[len(before.messages) :]] == ["assistant", "user"]
            assert len(after.messages[-2]["content"].split()) == before.max_tokens
            assert (after.prefix, after.tools) == (before.prefix, before.tools)


def test_the_first_turn_does_not_wait_and_the_others_think() -> None:
    drawn = sessions()
    assert {turns[0].think_s for turns in drawn} == {0.0}
    thinks_s = [call.think_s for turns in drawn for call in turns[1:]]
    assert sum(thinks_s) / len(thinks_s) == pytest.approx(THINK_S, rel=0.1)


def test_the_seed_decides_and_a_longer_run_begins_with_the_shorter_one() -> None:
    prefixes = load_prefixes(None)
    short = generate_sessions(prefixes, 100, 1, 1.1, TURNS)
    assert generate_sessions(prefixes, 300, 1, 1.1, TURNS)[:100] == short
    assert generate_sessions(prefixes, 100, 2, 1.1, TURNS) != short


def test_no_two_prompts_are_equal() -> None:
    prompts = [json.dumps([call.messages, call.tools]) for turns in sessions(500) for call in turns]
    assert len(set(prompts)) == len(prompts)
