"""The levers that only vLLM has, or moves in its own way."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.interface import PauseState

from e2e.real_schedulers.on_vllm.fixtures import Build
from e2e.real_schedulers.plans import Scripted, everything, forced
from e2e.real_schedulers.workloads import prompt
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan


def test_chunk_of_each_call(build: Build) -> None:
    chunks = {"a": 40, "b": 7}

    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        return Plan((), tuple((call, chunks[call.call_id]) for call in (*running, *waiting)))

    engine = build(Scripted(script))
    for seed, name in enumerate(chunks):
        engine.add(prompt(100, seed), name=name)
    assert [engine.step() for _ in range(2)] == [chunks] * 2
    assert engine.planner.diverged_picks == 0


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
    assert engine.planner.diverged_picks == 0


def test_whoever_comes_last_takes_what_others_leave(build: Build) -> None:
    """Most of the second prompt is in the cache by the time that it is admitted, which the plan could not know."""

    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        return Plan((), tuple(zip(waiting, (64, 100, 20), strict=True)), (), 184)

    engine = build(Scripted(script))
    for name, tokens in {"a": prompt(64, 1), "b": prompt(100, 1), "c": prompt(100, 2)}.items():
        engine.add(tokens, name=name)
    assert engine.step() == {"a": 64, "b": 36, "c": 84}


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


@pytest.mark.parametrize(
    ("levers", "steps"),
    [
        ({"order": "reverse"}, [{"b": 100}, {"b": 1, "a": 99}]),
        ({"budget_tokens": 30}, [{"a": 30}, {"a": 30}]),
        ({"chunk_tokens": 30}, [{"a": 30}, {"a": 30, "b": 30}]),
    ],
)
def test_levers_can_be_pulled_by_settings(
    build: Build, levers: dict[str, int | str], steps: list[dict[str, int]]
) -> None:
    engine = build(plait=forced("fcfs", **levers), max_batch_tokens=100)
    for seed, name in enumerate("ab"):
        engine.add(prompt(100, seed), name=name)
    assert [engine.step() for _ in steps] == steps


def test_a_paused_engine_is_left_to_vllm(build: Build) -> None:
    engine = build(Scripted(lambda waiting, running, _: everything(waiting, running)))
    engine.add(prompt(10, 1), name="a")
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.step() == {}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.step() == {"a": 10}
