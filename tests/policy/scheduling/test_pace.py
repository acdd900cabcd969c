"""What an engine's pace is made of: its latest iterations and their model, the outputs, and the preemptions."""

from __future__ import annotations

import pytest

from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.outputs import START_OUTPUT_TOKENS, CallClass, Outputs, RecentOutputs
from plait.policy.scheduling.pace import PREEMPTION_ITERATIONS, Pace, PreemptionHistory, RecentIterations
from plait.policy.scheduling.plan import RECENT_ITERATIONS, IterationWork, LocalCall
from plait.policy.types import Objective, Slo
from tests.policy.scheduling.fake_engine import COSTS


def pace(iterations: RecentIterations, model: IterationModel, max_batch_tokens: int = 2048) -> Pace:
    return Pace.of(iterations, model, PreemptionHistory(), RecentOutputs(), max_batch_tokens)


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


def pace_of(outputs: RecentOutputs) -> Pace:
    return Pace.of(RecentIterations(), IterationModel(), PreemptionHistory(), outputs, 1)


def ended(output_tokens: int, objective: Objective | None = None, slo: Slo | None = None) -> LocalCall:
    return LocalCall("ended", 0.0, 10, 10, output_tokens, slo, objective)


def test_mean_outputs_are_those_of_calls_of_the_class_that_have_left() -> None:
    outputs = RecentOutputs()
    plain, chat = ended(10), ended(30, Objective.LATENCY, Slo(ttft_s=1.0, tpot_s=0.04))
    part = ended(500, Objective.LATENCY, Slo(jct_s=9.0))
    assert pace_of(outputs).output_tokens(plain) == START_OUTPUT_TOKENS
    outputs.on_ended([plain, ended(20), part])
    assert [pace_of(outputs).output_tokens(call) for call in (plain, part)] == [15, 500]
    assert pace_of(outputs).output_tokens(chat) == START_OUTPUT_TOKENS, "a task group says nothing about chats"


@pytest.mark.parametrize(
    ("generated", "limit", "to_come"),
    [
        *((0, None, 200), (20, None, 380), (150, None, 250), (399, None, 1), (900, None, 32)),
        *((0, 80, 80), (70, 80, 10), (150, 900, 250), (80, 80, 1), (0, 0, 1)),
    ],
)
def test_tokens_to_come_are_within_the_limit(generated: int, limit: int | None, to_come: int) -> None:
    outputs: dict[CallClass, Outputs] = {(None, False): Outputs((10, 20, 150, 200, 400), 156.0)}
    pace = Pace(longest_s=0.0, shortest_s=0.0, chunk_tokens=1.0, outputs=outputs)
    call = LocalCall("c", 0.0, 10, 10, generated, max_output_tokens=limit)
    assert pace.tokens_to_come(call) == to_come


@pytest.mark.parametrize(
    ("generated", "limit", "to_come"),
    [
        *((0, None, 156), (100, None, 56), (150, None, 32), (900, None, 32)),
        *((0, 80, 80), (70, 80, 10), (100, 900, 56), (80, 80, 1)),
    ],
)
def test_the_rest_of_the_mean_output_is_32_at_least_and_within_the_limit(
    generated: int, limit: int | None, to_come: float
) -> None:
    outputs: dict[CallClass, Outputs] = {(None, False): Outputs((10, 20, 150, 200, 400), 156.0)}
    pace = Pace(longest_s=0.0, shortest_s=0.0, chunk_tokens=1.0, outputs=outputs)
    call = LocalCall("c", 0.0, 10, 10, generated, max_output_tokens=limit)
    assert pace.mean_tokens_to_come(call) == to_come


def test_a_call_that_is_neither_running_nor_waiting_any_more_has_left() -> None:
    history, calls = PreemptionHistory(), [LocalCall(str(n), 0.0, 10, 10, 1) for n in range(3)]
    assert history.on_plan(0.0, [], calls) == []
    assert history.on_plan(1.0, [calls[1]], []) == [calls[0], calls[2]]


def test_preemptions_are_counted_per_generated_token_and_timed() -> None:
    history, call = PreemptionHistory(), LocalCall("c", 0.0, 10, 10, 1)
    history.on_plan(0.0, [], [call])
    for _ in range(10):
        history.on_iteration(IterationWork.of([1, 1, 50], [10, 10, 0]))
    assert history.on_plan(1.0, [call], []) == []
    assert history.on_plan(3.0, [call], []) == []
    assert history.on_plan(3.5, [], [call]) == []
    assert (history.rate, history.longest_s) == (1 / 20, 2.5)
    assert history.times(call) == 1
    for _ in range(PREEMPTION_ITERATIONS):
        history.on_iteration(IterationWork.of([1], [10]))
    assert history.longest_s == 0.0
    history.on_plan(9.0, [], [])
    assert history.times(call) == 0, "it has left"


def test_a_call_that_leaves_while_preempted_is_forgotten() -> None:
    history, call = PreemptionHistory(), LocalCall("c", 0.0, 10, 10, 4)
    history.on_plan(0.0, [], [call])
    history.on_plan(1.0, [call], [])
    assert history.on_plan(2.0, [], []) == [call]
    assert history.on_plan(3.0, [], []) == []
