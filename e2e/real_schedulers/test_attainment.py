"""What the driver reports of the promises that the engine kept."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.real_schedulers.built_engine import Build, BuiltEngine, Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(build: Build, clock: Clock) -> BuiltEngine:
    """It follows the clock."""
    built = build(plait={"scheduler": "fcfs"})
    built.follow_clock(clock)
    return built


def run(engine: BuiltEngine, clock: Clock) -> None:
    """A step takes a second."""
    while engine.busy:
        engine.step()
        clock.now_s += 1.0


def attainment(engine: BuiltEngine) -> float | None:
    return engine.report(None, None).scheduler.slo_attainment


def ask(engine: BuiltEngine, name: str, output_tokens: int = 3, **annotations: Any) -> None:
    """Send a prompt that needs nearly a whole step."""
    engine.add([ord(name), *range(engine.batch_tokens * 15 // 16)], output_tokens, name=name, **annotations)


def fill_a_step(engine: BuiltEngine, first: int) -> None:
    """Send a prompt that needs a whole step, or what decodes leave of it."""
    engine.add([(first + position) % 1000 for position in range(engine.batch_tokens)], 50)


def test_it_is_what_the_engine_did(engine: BuiltEngine, clock: Clock) -> None:
    ask(engine, "a")
    run(engine, clock)
    assert attainment(engine) is None, "it was promised nothing"
    ask(engine, "b", plait_ttft_ms=3500, plait_tpot_ms=1100)
    ask(engine, "c", plait_ttft_ms=500)
    run(engine, clock)
    assert attainment(engine) == 0.5
    ask(engine, "d", plait_jct_ms=90_000)
    ask(engine, "e", plait_ttft_ms=8000, plait_jct_ms=90_000, plait_age_ms=9000)
    run(engine, clock)
    assert attainment(engine) == 0.5, "e had waited elsewhere"


def test_a_call_that_is_given_up_counts_if_it_was_late(engine: BuiltEngine, clock: Clock) -> None:
    fill_a_step(engine, 500)
    for name in "ab":
        ask(engine, name, plait_ttft_ms=500)
    engine.step()
    engine.abort("b")
    engine.abort("a")
    engine.step()
    assert attainment(engine) is None, "no time has passed"
    fill_a_step(engine, 200)
    ask(engine, "c", plait_ttft_ms=500)
    engine.step()
    clock.now_s += 1.0
    engine.abort("c")
    engine.step()
    assert attainment(engine) == 0.0
    ask(engine, "d", plait_ttft_ms=5000, output_tokens=50)
    for _ in range(6):
        engine.step()
    engine.abort("d")
    for _ in range(3):
        engine.step()
    assert attainment(engine) == 0.5, "it had its first token"
