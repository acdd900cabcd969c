"""What vLLM computes while a plan is made, also where no plan was followed."""

from __future__ import annotations

from vllm.v1.core.sched.interface import PauseState

from e2e.real_schedulers.on_vllm.fixtures import Build
from e2e.real_schedulers.plans import Scripted, everything
from e2e.real_schedulers.workloads import prompt
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.plan import EngineFacts, IterationWork, LocalCall, Plan


class Measured:
    """Keeps what it observes."""

    def __init__(self) -> None:
        self.work: list[IterationWork] = []

    def expect(self, costs: CostModel) -> None: ...

    def observe(self, duration_s: float, work: IterationWork) -> None:
        del duration_s
        self.work.append(work)


def test_an_iteration_without_tokens_is_not_in_flight(build: Build) -> None:
    """The engine core has it in its queue, and no device computes it."""
    seen: list[bool] = []
    held = False

    def script(waiting: list[LocalCall], running: list[LocalCall], facts: EngineFacts) -> Plan:
        seen.append(facts.in_flight is not None)
        return Plan((), (), ()) if held else everything(waiting, running)

    engine = build(Scripted(script))
    engine.add(prompt(50, 1), 9, name="a")
    assert engine.step() == {"a": 50}
    held = True
    assert [engine.step() for _ in range(2)] == [{}, {}]
    assert seen == [False, engine.setup.asynchronous, False]


def test_the_work_while_new_requests_are_paused(build: Build) -> None:
    """vLLM decides what runs then, so no call has been followed to the iteration."""
    engine, measured = build(Scripted(lambda waiting, running, _: everything(waiting, running))), Measured()
    engine.planner._measuring = measured
    engine.add(prompt(50, 1), 4, name="a")
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.run()
    decodes = [IterationWork.of([1], [context]) for context in (50, 51, 52)]
    assert measured.work == [IterationWork.of([50], [0]), *decodes]
