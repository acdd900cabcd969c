"""Each lever of a plan moves vLLM's own scheduler: seen in what it schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from vllm.v1.core.sched.interface import PauseState

from e2e.vllm.unit.engine import Build
from plait.policy.scheduling.local_scheduler import EngineFacts, LocalCall, Plan
from plait.policy.types import Objective, Slo


def prompt(tokens: int, seed: int) -> list[int]:
    """No two of these share a block."""
    return [(seed * 37 + position * 11) % 1000 for position in range(tokens)]


@dataclass
class Scripted:
    """Plans as a test says, and keeps what it was asked with."""

    script: Callable[[list[LocalCall], list[LocalCall], EngineFacts], Plan]
    seen: list[tuple[list[LocalCall], list[LocalCall]]] = field(default_factory=list)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        del now_s
        self.seen.append((list(waiting), list(running)))
        return self.script(list(waiting), list(running), facts)


def everything(waiting: list[LocalCall], running: list[LocalCall]) -> Plan:
    return Plan((), (), (*running, *waiting))


def test_order(build: Build) -> None:
    engine = build(Scripted(lambda waiting, running, _: everything(waiting[::-1], running)), max_batch_tokens=250)
    for seed in range(4):
        engine.add(prompt(100, seed), name=f"call-{seed}")
    assert engine.step() == {"call-3": 100, "call-2": 100, "call-1": 50}


def test_budget(build: Build) -> None:
    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        return Plan((), (), (*running, *waiting), budget_tokens=33)

    engine = build(Scripted(script))
    engine.add(prompt(100, 1), name="a")
    assert [engine.step() for _ in range(3)] == [{"a": 33}] * 3
    assert engine.scheduler.max_num_scheduled_tokens == engine.setup.max_batch_tokens, "it is given back"


def test_budget_is_never_above_the_engines_own(build: Build) -> None:
    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        return Plan((), (), (*running, *waiting), budget_tokens=10_000)

    engine = build(Scripted(script), max_batch_tokens=64)
    engine.add(prompt(100, 1), name="a")
    assert engine.step() == {"a": 64}


def test_chunk_of_each_call(build: Build) -> None:
    chunks = {"a": 40, "b": 7}

    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        return Plan((), tuple((call, chunks[call.call_id]) for call in (*running, *waiting)))

    engine = build(Scripted(script))
    for seed, name in enumerate(chunks):
        engine.add(prompt(100, seed), name=name)
    assert [engine.step() for _ in range(2)] == [chunks] * 2
    assert engine.driver.diverged_picks == 0


def urgent_first(waiting: list[LocalCall], running: list[LocalCall]) -> Plan:
    """Two output tokens or a short prompt go before the long prompt that runs already, which gets the rest of 60."""
    calls = sorted([*running, *waiting], key=lambda call: call.prompt_tokens)
    picks, left = [], 60
    for call in calls:
        tokens = min(call.prompt_tokens + call.output_tokens - call.computed_tokens, left)
        left -= tokens
        if tokens:
            picks.append((call, tokens))
    return Plan((), tuple(picks), (), 60)


def test_a_running_prompt_leaves_room_for_whom_the_plan_puts_before_it(build: Build) -> None:
    """Though vLLM serves running calls before waiting ones, and those admitted first before the others."""
    engine = build(Scripted(lambda waiting, running, _: urgent_first(waiting, running)))
    engine.add(prompt(400, 1), name="long")
    assert engine.step() == {"long": 60}
    engine.add(prompt(20, 2), 3, name="short")
    assert [engine.step() for _ in range(3)] == [{"long": 40, "short": 20}, *[{"long": 59, "short": 1}] * 2]
    assert engine.driver.diverged_picks == 0


def test_whoever_comes_last_takes_what_others_leave(build: Build) -> None:
    """Most of the second prompt is in the cache by the time that it is admitted, which the plan could not know."""

    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        return Plan((), tuple(zip(waiting, (64, 100, 20), strict=True)), (), 184)

    engine = build(Scripted(script))
    for name, tokens in {"a": prompt(64, 1), "b": prompt(100, 1), "c": prompt(100, 2)}.items():
        engine.add(tokens, name=name)
    assert engine.step() == {"a": 64, "b": 36, "c": 84}


def test_a_waiting_call_is_held_back(build: Build) -> None:
    engine = build(Scripted(lambda waiting, running, _: everything([c for c in waiting if c.call_id != "b"], running)))
    for seed, name in enumerate("abc"):
        engine.add(prompt(50, seed), name=name)
    assert engine.step() == {"a": 50, "c": 50}
    assert [request.request_id for request in engine.scheduler.waiting] == ["b"], "it waits on"
    assert "b" not in engine.step()


def test_held_back_calls_are_counted_as_waiting(build: Build) -> None:
    counted: list[tuple[int, int]] = []
    engine = build(Scripted(lambda waiting, running, _: everything(waiting[:1], running)))
    original = engine.scheduler.kv_cache_manager.new_step_starts

    def new_step_starts() -> None:  # vLLM calls it in the middle of schedule()
        counted.append(engine.scheduler.get_request_counts())
        original()

    engine.scheduler.kv_cache_manager.new_step_starts = new_step_starts
    for seed in range(4):
        engine.add(prompt(50, seed))
    engine.step()
    assert (counted, engine.scheduler.get_request_counts()) == ([(0, 4)], (1, 3))


def test_a_running_call_is_held_back_in_prefill_and_in_decode(build: Build) -> None:
    held: set[str] = set()
    engine = build(
        Scripted(lambda waiting, running, _: everything(waiting, [c for c in running if c.call_id not in held])),
        max_batch_tokens=80,
    )
    engine.add(prompt(30, 1), 20, name="decode")
    engine.add(prompt(100, 2), 20, name="prefill")
    assert engine.step() == {"decode": 30, "prefill": 50}
    held |= {"decode", "prefill"}
    assert engine.step() == {}
    held.remove("prefill")
    assert engine.step() == {"prefill": 50}
    held.clear()
    assert engine.step() == {"decode": 1, "prefill": 1}


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
    assert [request.request_id for request in engine.scheduler.waiting] == ["a"]
    assert (engine.driver.preemptions, engine.driver.report(None, None).scheduler.preemptions) == (1, 1)
    preempt.clear()
    engine.run()
    assert {name: len(tokens) for name, tokens in engine.tokens.items()} == {"a": 12, "b": 12}


def test_output_is_the_same_however_often_a_call_is_preempted(build: Build) -> None:
    outputs = []
    for every in (0, 3):
        engine = build(plait={"scheduler": "fcfs", "levers": {"preempt_every_iterations": every}})
        for seed in range(6):
            engine.add(prompt(90 + seed, seed), 10 + seed)
        engine.run()
        outputs.append(engine.tokens)
        assert bool(engine.driver.preemptions) is bool(every)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("levers", "steps"),
    [
        ({"order": "reverse"}, [{"b": 100}, {"b": 1, "a": 99}]),
        ({"budget_tokens": 30}, [{"a": 30}, {"a": 30}]),
        ({"chunk_tokens": 30}, [{"a": 30}, {"a": 30, "b": 30}]),
    ],
)
def test_levers_can_be_pulled_by_settings(build: Build, levers: dict[str, int], steps: list[dict[str, int]]) -> None:
    engine = build(plait={"scheduler": "fcfs", "levers": levers}, max_batch_tokens=100)
    for seed, name in enumerate("ab"):
        engine.add(prompt(100, seed), name=name)
    assert [engine.step() for _ in steps] == steps


def test_calls_can_be_held_back_by_settings_while_others_run(build: Build) -> None:
    engine = build(plait={"levers": {"hold_back_iterations": 3}})
    engine.add(prompt(50, 1), 20, name="a")
    assert engine.step() == {"a": 50}, "nothing else runs"
    engine.add(prompt(50, 2), 20, name="b")
    taken = [engine.step() for _ in range(5)]
    assert ["b" in step for step in taken] == [False, False, False, True, True]


def test_a_call_carries_its_annotations_and_its_zero(build: Build) -> None:
    policy = Scripted(lambda waiting, running, _: everything(waiting, running))
    engine = build(policy)
    engine.add(prompt(10, 1), name="later")
    engine.add(
        prompt(10, 2),
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
    assert 4.9 < later.arrived_s - earlier.arrived_s < 6
    assert (earlier.slo, earlier.objective, earlier.priority) == (Slo(0.25, 0.0205), Objective.LATENCY, -2)
    assert (bad.slo, bad.objective, bad.priority) == (None, None, 0)
    assert dict(engine.driver.annotations.ignored) == {"plait_age_ms": 1, "plait_objective": 1, "plait_jct_ms": 1}


def test_a_paused_engine_is_left_to_vllm(build: Build) -> None:
    engine = build(Scripted(lambda waiting, running, _: everything(waiting, running)))
    engine.add(prompt(10, 1), name="a")
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.step() == {}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.step() == {"a": 10}
