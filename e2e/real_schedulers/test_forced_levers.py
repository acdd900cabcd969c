"""Levers pulled by force change another scheduler's plans, and nothing else."""

from __future__ import annotations

from e2e.own_schedulers.forced_levers import ForcedLevers, LeverSettings
from plait.backends.profiles import load_profile
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.in_order import Fcfs
from plait.policy.scheduling.plan import IterationWork, LocalCall, MeasuringScheduler, Plan


class Facts:
    """Nothing is cached, shared or short."""

    max_batch_tokens, max_running_calls, free_blocks = 100, 10, 1000
    in_flight = None
    loading = ()
    shares_in_iteration = True

    def stored_tokens(self, call: LocalCall) -> int:
        return call.computed_tokens

    def block_key(self, call: LocalCall, tokens: int) -> None:
        del call, tokens

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        del call, other
        return 0

    def cached_tokens(self, call: LocalCall) -> int:
        del call
        return 0

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        del call, new_tokens
        return 0

    def blocks_freed(self, call: LocalCall) -> int:
        del call
        return 0


WAITING = [LocalCall("a", 0.0, 60), LocalCall("b", 1.0, 60)]
RUNNING = [LocalCall("x", 0.0, 8, 10, 3), LocalCall("y", 0.0, 8, 9, 2)]


def plans(settings: LeverSettings, running: list[LocalCall], count: int = 1) -> list[Plan]:
    scheduler = ForcedLevers(Fcfs(), settings)
    return [scheduler.plan(0.0, WAITING, running, Facts()) for _ in range(count)]


def names(plan: Plan) -> list[tuple[str, int]]:
    return [(call.call_id, tokens) for call, tokens in plan.picks]


def test_by_default_nothing_changes() -> None:
    assert plans(LeverSettings(), RUNNING) == [Fcfs().plan(0.0, WAITING, RUNNING, Facts())]


def test_the_latest_first() -> None:
    assert names(plans(LeverSettings(order="reverse"), [])[0]) == [("b", 60), ("a", 40)]


def test_budget_and_chunk() -> None:
    (plan,) = plans(LeverSettings(budget_tokens=30, chunk_tokens=25), RUNNING)
    assert plan.budget_tokens == 30
    assert names(plan) == [("x", 1), ("y", 1), ("a", 25), ("b", 25)]


def test_calls_are_held_back_while_others_run() -> None:
    admitted = [len(plan.picks) - 2 for plan in plans(LeverSettings(hold_back_iterations=2), RUNNING, 4)]
    assert admitted == [0, 0, 2, 2]
    assert len(plans(LeverSettings(hold_back_iterations=2), [])[0].picks) == 2


def test_the_one_with_most_output_is_preempted_now_and_then() -> None:
    preempted = [
        [call.call_id for call in plan.preempt] for plan in plans(LeverSettings(preempt_every_iterations=3), RUNNING, 6)
    ]
    assert preempted == [[], [], ["x"], [], [], ["x"]]
    plan = plans(LeverSettings(preempt_every_iterations=1), RUNNING)[0]
    assert "x" not in dict(names(plan))


class Measuring(Fcfs):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def expect(self, costs: CostModel) -> None:
        self.told.append(costs)

    def observe(self, duration_s: float, work: IterationWork) -> None:
        self.told.append((duration_s, work))


def test_a_scheduler_that_measures_is_told_what_there_is_to_measure() -> None:
    costs, inner = load_profile("a6000-mistral-7b").cost_model(), Measuring()
    levers = ForcedLevers(inner, LeverSettings(chunk_tokens=25))
    assert isinstance(levers, MeasuringScheduler)
    levers.expect(costs)
    levers.observe(0.1, IterationWork.of([25], [0]))
    assert inner.told == [
        costs,
        (0.1, IterationWork(new_tokens=25, sequence_tokens=25, chunks=((25, 0),))),
    ]


def test_one_that_does_not_is_left_alone() -> None:
    levers = ForcedLevers(Fcfs(), LeverSettings(chunk_tokens=25))
    levers.expect(load_profile("a6000-mistral-7b").cost_model())
    levers.observe(0.1, IterationWork.of([25], [0]))
    assert names(levers.plan(0.0, WAITING, [], Facts())) == [("a", 25), ("b", 25)]
