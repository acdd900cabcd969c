"""What is measured fits the engine, whatever it can take, and begins with what is cheap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.lab.profiling.profile_plan import FULL, QUICK, Effort, Kind, Limits, Trial, chunks, plan

LIMITS = st.builds(
    Limits,
    context_tokens=st.integers(256, 300_000),
    budget_tokens=st.none() | st.integers(64, 20_000),
    kv_tokens=st.none() | st.integers(512, 1_000_000),
)
EFFORTS = st.sampled_from([QUICK, FULL])


@given(LIMITS, EFFORTS)
def test_nothing_exceeds_the_engine(limits: Limits, effort: Effort) -> None:
    for trials in plan(limits, effort).values():
        for trial in trials:
            one = trial.new_tokens + trial.context_tokens + trial.output_tokens
            assert one <= limits.context_tokens
            assert trial.batch * one <= 0.8 * (limits.kv_tokens or limits.context_tokens)
            assert trial.kind is Kind.CHUNKED or trial.new_tokens <= (limits.budget_tokens or limits.context_tokens)


@given(LIMITS, EFFORTS)
def test_cheap_trials_come_first_and_none_twice(limits: Limits, effort: Effort) -> None:
    for trials in plan(limits, effort).values():
        assert [trial.tokens for trial in trials] == sorted(trial.tokens for trial in trials)
        assert len(set(trials)) == len(trials) > 0


@given(LIMITS, EFFORTS)
def test_there_always_is_enough_for_a_fit(limits: Limits, effort: Effort) -> None:
    trials = plan(limits, effort)
    assert trials[Kind.DECODE][0].batch == 1
    assert trials[Kind.PREFILL][0].new_tokens == 1
    assert len(trials[Kind.PREFILL]) >= 3


def test_a_usual_engine_is_measured_over_its_whole_range() -> None:
    trials = plan(Limits(32_768, 2048, 200_000), FULL)
    assert max(trial.batch for trial in trials[Kind.DECODE]) == 64
    assert trials[Kind.PREFILL][-1].new_tokens == 2048
    assert max(trial.context_tokens for trial in trials[Kind.CACHED_PREFIX]) > 30_000
    assert [trial.new_tokens for trial in trials[Kind.CHUNKED]] == [4096, 8192]


@pytest.mark.parametrize("effort", [QUICK, FULL])
def test_sizes_are_asked_on_both_sides_of_likely_steps(effort: Effort) -> None:
    trials = plan(Limits(32_768, 2048, 200_000), effort)
    batches = {trial.batch for trial in trials[Kind.DECODE]}
    assert {4, 5, 8, 9, 16} <= batches
    assert {256, 257, 512, 513} <= {trial.new_tokens for trial in trials[Kind.PREFILL]}
    assert sum(map(len, trials.values())) <= 4 / 3 * {QUICK: 27, FULL: 50}[effort], "as many as one curve needs"


def test_without_a_known_budget_prompts_go_to_the_context_and_nothing_is_called_chunked() -> None:
    trials = plan(Limits(8_000), QUICK)
    assert trials[Kind.PREFILL][-1].new_tokens == 4096
    assert Kind.CHUNKED not in trials


def test_a_tiny_context_leaves_out_what_has_no_room() -> None:
    trials = plan(Limits(256, 512, 4_096), QUICK)
    assert Kind.CHUNKED not in trials
    assert all(trial.context_tokens < 256 for trial in trials[Kind.DECODE])


@pytest.mark.parametrize(
    ("new", "context", "budget", "expected"),
    [
        (5, 100, None, (((5, 100),),)),
        (5, 100, 5, (((5, 100),),)),
        (11, 100, 5, (((5, 100),), ((5, 105),), ((1, 110),))),
    ],
)
def test_chunks(new: int, context: int, budget: int | None, expected: object) -> None:
    assert chunks(new, context, budget) == expected


def test_room_is_kept_for_a_second_try_with_twice_the_output() -> None:
    trial = Trial(Kind.DECODE, 1, 99, batch=2, output_tokens=30)
    assert trial.fits(Limits(160, kv_tokens=400))
    assert not trial.fits(Limits(159, kv_tokens=400))
    assert not trial.fits(Limits(160, kv_tokens=399))
