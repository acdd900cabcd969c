"""What an engine's pace is made of: its latest iterations, and the model of them."""

from __future__ import annotations

import pytest

from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.iteration_work import IterationWork
from plait.policy.scheduling.outputs import MeanOutputs
from plait.policy.scheduling.pace import Pace, RecentIterations
from plait.policy.scheduling.plan import RECENT_ITERATIONS
from plait.policy.scheduling.preemption_history import PreemptionHistory
from tests.policy.scheduling.fake_engine import COSTS


def pace(iterations: RecentIterations, model: IterationModel, max_batch_tokens: int = 2048) -> Pace:
    return Pace.of(iterations, model, PreemptionHistory(), MeanOutputs(), max_batch_tokens)


def test_a_known_engine_starts_at_its_pivot() -> None:
    model = IterationModel()
    model.expect(COSTS)
    start = pace(RecentIterations(), model)
    # 90 % of 10,000 tokens/s: n / (0.01 + 1e-4 n) = 9,000 at n = 900, in 0.1 s.
    assert (start.chunk_tokens, start.longest_s, start.tokens_per_s) == pytest.approx((900, 0.1, 9000))
    assert start.shortest_s == pytest.approx(0.0101)
    assert pace(RecentIterations(), model, 512).chunk_tokens == 512, "no chunk is longer than an iteration"


def test_an_unknown_one_is_taken_to_compute_in_no_time() -> None:
    start = pace(RecentIterations(), IterationModel())
    assert (start.chunk_tokens, start.longest_s, start.shortest_s, start.tokens_per_s) == (2048, 0.0, 0.0, None)


def test_the_longest_iteration_and_the_mean_chunk_are_of_the_last_128() -> None:
    iterations, model = RecentIterations(), IterationModel()
    iterations.on_iteration(9.0, IterationWork.of([1000, 1], [0, 50]))
    assert (pace(iterations, model).longest_s, pace(iterations, model).chunk_tokens) == (9.0, 1000)
    for number in range(RECENT_ITERATIONS):
        iterations.on_iteration(0.1, IterationWork.of([100 + number % 2 * 100, 1, 1], [0, 50, 50]))
    assert (pace(iterations, model).longest_s, pace(iterations, model).chunk_tokens) == (0.1, 150)


def test_a_generated_token_takes_the_longest_iteration_and_its_share_of_preemptions() -> None:
    slow = Pace(longest_s=0.1, shortest_s=0.0, chunk_tokens=1.0, preemption_rate=1 / 20, longest_preemption_s=2.5)
    assert slow.token_s == pytest.approx(0.1 + 2.5 / 20)
