"""The outputs that are expected of task groups' calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.group_outputs import RECENT_CALLS, GroupOutputs


def test_until_one_has_ended_a_call_is_expected_to_reach_its_limit() -> None:
    outputs = GroupOutputs(128.0)
    assert [outputs.expected_tokens("m", limit) for limit in (None, 20, 900)] == [128, 20, 900]
    outputs.ended("other", 5)
    assert outputs.expected_tokens("m", 900) == 900


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=RECENT_CALLS), st.integers(1, 5000))
def test_then_it_is_expected_to_reach_their_mean_but_not_beyond_its_limit(ended: list[int], limit: int) -> None:
    outputs = GroupOutputs(128.0)
    for tokens in ended:
        outputs.ended("m", tokens)
    mean_tokens = sum(ended) / len(ended)
    assert outputs.expected_tokens("m", None) == pytest.approx(mean_tokens)
    assert outputs.expected_tokens("m", limit) == pytest.approx(min(mean_tokens, limit))


def test_calls_of_long_ago_hardly_count() -> None:
    outputs = GroupOutputs(128.0)
    for tokens in [1000] * 500 + [10] * 5 * RECENT_CALLS:
        outputs.ended("m", tokens)
    assert 10 < outputs.expected_tokens("m", None) < 20
