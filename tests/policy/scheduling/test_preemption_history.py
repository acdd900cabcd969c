"""Preemptions, from the calls of successive plans."""

from __future__ import annotations

from plait.policy.scheduling.iteration_work import IterationWork
from plait.policy.scheduling.plan import LocalCall
from plait.policy.scheduling.preemption_history import PREEMPTION_ITERATIONS, PreemptionHistory


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
