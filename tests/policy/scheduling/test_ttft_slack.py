"""The slack that recent calls had in their TTFT."""

from __future__ import annotations

import pytest

from plait.policy.scheduling.batching import Candidate
from plait.policy.scheduling.slo import SLACK_CALLS, SLACK_MEMORY_S, Objectives, TtftSlack, slacks_s
from tests.policy.scheduling.fake_engine import COSTS, prompt


def test_three_quarters_of_the_calls_had_at_least_the_lower_quartile() -> None:
    slack = TtftSlack()
    assert slack.quartile_s(0.0) is None
    for number in (3, 1, 0, 2):
        slack.on_start(0.0, float(number))
    assert slack.quartile_s(0.0) == 1.0


def test_calls_are_remembered_for_a_minute() -> None:
    slack = TtftSlack()
    slack.on_start(0.0, 1.0)
    slack.on_start(10.0, 5.0)
    assert slack.quartile_s(SLACK_MEMORY_S) == 1.0
    assert slack.quartile_s(SLACK_MEMORY_S + 5.0) == 5.0
    assert slack.quartile_s(SLACK_MEMORY_S + 15.0) is None


def test_only_the_latest_calls_count() -> None:
    slack = TtftSlack()
    for _ in range(SLACK_CALLS):
        slack.on_start(0.0, 1.0)
    for _ in range(SLACK_CALLS):
        slack.on_start(1.0, 2.0)
    assert slack.quartile_s(1.0) == 2.0


def test_a_pick_counts_once_the_engine_runs_the_call() -> None:
    slack, call = TtftSlack(), prompt("c", 100, 1.0)
    slack.expect({call: 0.5})
    assert slack.quartile_s(0.0) is None
    slack.on_plan(1.0, [call])
    slack.on_plan(2.0, [call])
    assert slack.quartile_s(SLACK_MEMORY_S + 1.0) == 0.5
    assert slack.quartile_s(SLACK_MEMORY_S + 1.5) is None, "it started once, at 1 s"


def test_slack_is_what_a_ttft_leaves_beyond_the_prompt_on_an_idle_engine() -> None:
    calls = [prompt("loose", 100, 1.0), prompt("tight", 100, 0.01), prompt("plain", 100)]
    starting = [Candidate(call, 100, 0, waits=True) for call in calls]
    assert slacks_s(starting, Objectives(), COSTS) == {calls[0]: pytest.approx(1.0 - 0.02)}
    assert slacks_s(starting, Objectives(), None) == {}
