"""Each lever of a plan moves the engine's own scheduler: seen in what it runs."""

from __future__ import annotations

import time

import pytest

from e2e.real_schedulers.built_engine import Build, answer
from e2e.real_schedulers.plans import Scripted, everything, forced
from e2e.real_schedulers.workloads import prompt
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from plait.policy.types import Objective, Slo


def test_order(build: Build) -> None:
    engine = build(Scripted(lambda waiting, running, _: everything(waiting[::-1], running)))
    for seed in range(4):
        engine.add(prompt(engine.batch_tokens * 2 // 5, seed), name=f"call-{seed}")
    assert list(engine.step()) == ["call-3", "call-2", "call-1"]


def test_budget(build: Build) -> None:
    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        return Plan((), (), (*running, *waiting), budget_tokens=48)

    engine = build(Scripted(script))
    own = engine.batch_tokens
    engine.add(prompt(100, 1), name="a")
    assert [engine.step() for _ in range(2)] == [{"a": 48}] * 2
    assert engine.batch_tokens == own, "it is given back"


def test_budget_is_never_above_the_engines_own(build: Build) -> None:
    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        return Plan((), (), (*running, *waiting), budget_tokens=10_000)

    engine = build(Scripted(script))
    engine.add(prompt(engine.batch_tokens + 100, 1), name="a")
    assert engine.step() == {"a": engine.batch_tokens}


def test_a_waiting_call_is_held_back(build: Build) -> None:
    engine = build(Scripted(lambda waiting, running, _: everything([c for c in waiting if c.call_id != "b"], running)))
    for seed, name in enumerate("abc"):
        engine.add(prompt(50, seed), name=name)
    assert engine.step() == {"a": 50, "c": 50}
    assert engine.waiting == ["b"], "it waits on"
    assert "b" not in engine.step()
    assert engine.report(None, None).queue.waiting == 1


def test_voluntary_preemption(build: Build) -> None:
    preempt: list[str] = []

    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        victims = tuple(call for call in running if call.call_id in preempt)
        return Plan(victims, (), (*(call for call in running if call not in victims), *waiting))

    engine = build(Scripted(script))
    for seed, name in enumerate("ab"):
        engine.add(prompt(60, seed), 12, name=name)
    for _ in range(4):
        engine.step()
    preempt.append("a")
    assert engine.step() == {"b": 1}
    assert engine.waiting == ["a"]
    assert (engine.driver.preemptions, engine.report(None, None).scheduler.preemptions) == (1, 1)
    preempt.clear()
    engine.run()
    assert engine.tokens == {name: answer(60, 12) for name in "ab"}


@pytest.mark.parametrize("every", [0, 3])
def test_output_is_the_same_however_often_a_call_is_preempted(build: Build, every: int) -> None:
    engine = build(plait=forced("fcfs", preempt_every_iterations=every))
    for seed in range(6):
        engine.add(prompt(90 + seed, seed), 10 + seed, name=f"call-{seed}")
    engine.run()
    assert engine.tokens == {f"call-{seed}": answer(90 + seed, 10 + seed) for seed in range(6)}
    assert bool(engine.driver.preemptions) is bool(every)


def test_calls_can_be_held_back_by_settings_while_others_run(build: Build) -> None:
    engine = build(plait=forced("slo", hold_back_iterations=3))
    engine.add(prompt(50, 1), 20, name="a")
    assert engine.step() == {"a": 50}, "nothing else runs"
    engine.add(prompt(50, 2), 20, name="b")
    taken = [engine.step() for _ in range(5)]
    assert ["b" in step for step in taken] == [False, False, False, True, True]


def test_a_call_carries_its_annotations_and_its_zero(build: Build) -> None:
    policy = Scripted(lambda waiting, running, _: everything(waiting, running))
    engine, began_s = build(policy), time.monotonic()
    engine.add(prompt(10, 1), name="later")
    engine.add(
        prompt(10, 2),
        20,
        name="earlier",
        plait_age_ms=5000,
        plait_ttft_ms="250",
        plait_tpot_ms=20.5,
        plait_objective="latency",
        plait_priority=-2,
    )
    engine.add(prompt(10, 3), name="bad", plait_age_ms="soon", plait_objective=7, plait_jct_ms=-1)
    engine.step()
    earlier, later, bad = policy.seen[0][0]
    assert (earlier.call_id, later.call_id, bad.call_id) == ("earlier", "later", "bad")
    assert 4.9 - (time.monotonic() - began_s) < later.arrived_s - earlier.arrived_s < 6
    assert (earlier.slo, earlier.objective, earlier.priority) == (Slo(0.25, 0.0205), Objective.LATENCY, -2)
    assert (earlier.max_output_tokens, later.max_output_tokens) == (20, 4)
    assert (bad.slo, bad.objective, bad.priority) == (None, None, 0)
    assert dict(engine.driver.annotations.ignored) == {"plait_age_ms": 1, "plait_objective": 1, "plait_jct_ms": 1}
