"""The levers that SGLang moves in its own way."""

from __future__ import annotations

import pytest

from e2e.real_schedulers.on_sglang.fixtures import Build
from e2e.real_schedulers.plans import Scripted, forced
from e2e.real_schedulers.workloads import prompt
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan


def test_chunk_of_a_prompt(build: Build) -> None:
    """SGLang has one prompt in chunks at a time. The other is picked whole."""
    chunks = {"a": 32, "b": 100}

    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        calls = [call for call in (*running, *waiting) if call.prompt_tokens > call.computed_tokens]
        return Plan((), tuple((call, min(chunks[call.call_id], call.uncomputed_tokens)) for call in calls))

    engine = build(Scripted(script))
    for seed, name in enumerate(chunks):
        engine.add(prompt(100, seed), name=name)
    assert [engine.step() for _ in range(2)] == [chunks, {"a": 32}]
    assert engine.planner.diverged_picks == 0


def test_the_prompt_in_chunks_is_held_back(build: Build) -> None:
    """Another prompt, which is not cut, goes before it."""
    held: list[str] = []

    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        calls = [call for call in (*running, *waiting) if call.call_id not in held]
        return Plan((), tuple((call, min(64, call.uncomputed_tokens)) for call in calls))

    engine = build(Scripted(script))
    engine.add(prompt(200, 1), name="long")
    assert engine.step() == {"long": 64}
    held.append("long")
    engine.add(prompt(50, 2), 1, name="short")
    assert engine.step() == {"short": 50}
    held.clear()
    assert engine.step()["long"] == 64


def test_the_prompt_in_chunks_can_be_aborted_while_it_is_held_back(build: Build) -> None:
    """Before 0.5.14, SGLang computes the prompt of an aborted call to its end."""
    held: list[str] = []

    def script(waiting: list[LocalCall], running: list[LocalCall], _: EngineFacts) -> Plan:
        calls = [call for call in (*running, *waiting) if call.call_id not in held]
        return Plan((), tuple((call, min(64, call.uncomputed_tokens)) for call in calls))

    engine = build(Scripted(script))
    engine.add(prompt(200, 1), name="long")
    assert engine.step() == {"long": 64}
    held.append("long")
    engine.add(prompt(50, 2), name="short")
    for _ in range(3):
        assert engine.step().keys() == {"short"}
    engine.abort("long")
    held.clear()
    engine.run()
    assert len(engine.tokens["short"]) == 4
    assert len(engine.tokens["long"]) <= 1
    assert not engine.report(None, None).calls


@pytest.mark.parametrize(
    ("levers", "steps"),
    [
        ({"order": "reverse"}, [{"b": 200, "a": 48}, {"a": 152, "b": 1}]),
        ({"chunk_tokens": 32}, [{"a": 32}, {"a": 32}]),
    ],
)
def test_levers_can_be_pulled_by_settings(
    build: Build, levers: dict[str, int | str], steps: list[dict[str, int]]
) -> None:
    engine = build(plait=forced("fcfs", **levers))
    for seed, name in enumerate("ab"):
        engine.add(prompt(200, seed), name=name)
    assert [engine.step() for _ in steps] == steps
