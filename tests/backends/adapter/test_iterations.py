"""The last iterations: durations that do not count overlaps twice, and chunks of prompts only."""

from __future__ import annotations

import pytest

from plait.backends.adapter.state_reporter import Iterations
from plait.policy.scheduling.plan import RECENT_ITERATIONS


def test_iterations_in_a_row() -> None:
    iterations = Iterations()
    assert iterations.last_s == 0.0
    for number, seconds in enumerate((0.1, 0.3)):
        iterations.begin(number, 10.0 * number)
        iterations.end(number, 10.0 * number + seconds)
        assert iterations.last_s == pytest.approx(seconds)
    state = iterations.state(512)
    assert state.mean_s == pytest.approx(0.2)
    assert state.max_s == pytest.approx(0.3)
    assert state.budget_tokens == 512


def test_an_iteration_counts_from_the_end_of_the_one_before() -> None:
    iterations = Iterations()
    iterations.begin(1, 0.0)
    iterations.begin(2, 0.1)
    iterations.end(1, 1.0)
    iterations.end(2, 1.5)
    assert iterations.state(0).mean_s == pytest.approx(0.75)
    iterations.end(3, 9.0)
    assert iterations.state(0).max_s == pytest.approx(1.0), "one that never began"


def test_who_knows_how_long_one_took_says_so() -> None:
    iterations = Iterations()
    iterations.took(0.25)
    iterations.took(0.75)
    assert iterations.last_s == 0.75
    assert (iterations.state(0).mean_s, iterations.state(0).max_s) == (0.5, 0.75)


def test_chunks_are_of_prompts() -> None:
    iterations = Iterations()
    iterations.computes([1, 100, 1, 50])
    assert iterations.state(0).mean_chunk_tokens == 75


def test_only_the_latest_count() -> None:
    iterations = Iterations()
    assert iterations.mean_queue_s == 0.0
    for queued_s in (1000.0, *[2.0] * RECENT_ITERATIONS):
        iterations.admitted(queued_s)
    assert iterations.mean_queue_s == 2.0
